"""``python -m pagecore.cli``: run the command `pagecore`."""

import sys

from pagecore.cli import main

sys.exit(main())
