"""``python -m bench [NAME ...] [--peer PEER] [--quick] [--json FILE]``; without a name, the list of names."""

import os
import sys


def run() -> int:
    """Hold the controls to one thread, as what they are timed beside is; OpenBLAS asks only when numpy is loaded."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from bench.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
