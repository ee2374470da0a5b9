"""``python -m pagecore``: the command `pagecore`."""

import sys

from pagecore.cli import main

sys.exit(main())
