"""``python -m pagecore.cli``."""

import sys

from pagecore.cli import main

sys.exit(main())
