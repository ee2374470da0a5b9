"""``python -m pagecore``: run the command `pagecore`."""

import sys

from pagecore.cli import main

sys.exit(main())
