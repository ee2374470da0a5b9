"""``python -m bench [NAME ...] [--peer PEER] [--quick] [--json FILE]``; without a name, the list of names."""

import os

# The controls run on one thread, as what they are held against does; OpenBLAS reads this when numpy is loaded.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import sys

from bench.cli import main

sys.exit(main())
