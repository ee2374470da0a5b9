"""Fail allocations of operations in a separate process, which they may crash: python -m tests.cache.failing_cells MOST.

Standard input has one cell per line, as JSON: kind of allocations, operation, configuration, situation, and the first
point. Standard output has one verdict per line, as JSON. The line before each verdict names its point, in case the
process crashes there.
"""

import json
import sys
from functools import lru_cache

from pagecore import set_num_threads
from tests.cache.operations import OPERATIONS
from tests.cache.state import State
from tests.cache.verdicts import Cell, judge, outcome, spread
from tests.faults import NativeAllocations, PythonAllocations, fail_allocation

# Source of the failing allocations, and the number of consecutive failures.
KINDS = {"native": 1, "python": 1, "python burst": 30}


def main(most: int) -> None:
    set_num_threads(1)
    native = NativeAllocations()
    for line in sys.stdin:
        kind, *parts, first = json.loads(line)
        cell = Cell(*parts)
        states, total = undisturbed(cell, native)
        turn = list(OPERATIONS).index(cell.operation) + list(KINDS).index(kind)
        for n in spread(total, most, turn):
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


@lru_cache(maxsize=1)
def undisturbed(cell: Cell, native: NativeAllocations) -> tuple[tuple[State, State], int]:
    """Return the states before and after a call, and its number of allocations: lines of one cell follow each other."""
    # Every Python allocation of this process is a native one.
    return outcome(cell), native.count(cell.ready()[1])


def report(kind: str, value: object) -> None:
    print(json.dumps([kind, value]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
