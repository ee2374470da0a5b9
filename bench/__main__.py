"""``python -m bench [NAME ...] [--quick] [--json FILE] [--plot FILE] ...``; without a name, the list of names."""

import os
import sys


def run() -> int:
    """Limit the controls to one thread unless a bench sets more, then run the command line.

    OpenBLAS reads its variable only when NumPy is loaded. OpenMP threads spin for milliseconds after their work, on the
    cores of whatever is timed next; GOMP_SPINCOUNT limits that.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from bench.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
