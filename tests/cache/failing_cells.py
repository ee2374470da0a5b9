"""Fail allocations of operations, in a process of its own that they may end: python -m tests.cache.failing_cells MOST.

Cells come by standard input, a line of JSON each: kind of allocations, operation, configuration, situation, and the
point to start from. Each verdict is a line of JSON on standard output; the line before it says which point is tried,
for the case that the process ends there.
"""

import json
import sys

from pagecore import set_num_threads
from tests.cache.verdicts import Cell, judge, outcome, spread
from tests.faults import NativeAllocations, PythonAllocations, fail_allocation

# Whose allocations fail, and how many one after the other.
KINDS = {"native": 1, "python": 1, "python burst": 30}


def main(most: int) -> None:
    set_num_threads(1)
    native = NativeAllocations()
    for line in sys.stdin:
        kind, *parts, first = json.loads(line)
        cell = Cell(*parts)
        states = outcome(cell)
        # Each of Python's allocations is a native one in this process.
        total = native.count(cell.ready()[1])
        for n in spread(total, most):
            if n < first:
                continue
            report("point", n)
            options = {"count": KINDS[kind], "allocations": native if kind == "native" else PythonAllocations()}
            run, problem = judge(
                cell,
                states,
                lambda call, n=n, options=options: fail_allocation(call, n, **options),
                may_lack_memory=True,
            )
            if run.reached:
                report("verdict", [run.where, problem])
        report("end", parts)


def report(kind: str, value: object) -> None:
    print(json.dumps([kind, value]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
