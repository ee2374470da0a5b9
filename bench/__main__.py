"""``python -m bench [NAME ...] [--quick] [--json FILE] [--plot FILE] ...``; without a name, the list of names."""

import os
import sys


def run() -> int:
    """Hold the controls to one thread, unless a bench asks for more; OpenBLAS asks only when numpy is loaded.

    Threads of OpenMP spin for milliseconds after their work, on the cores of whatever is timed next; here they do so no
    longer than where threads outnumber cores.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from bench.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
