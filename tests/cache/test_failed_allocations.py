"""A failed allocation at any point of any operation: MemoryError, and the operation is done or undone."""

import json
from functools import cache

import pytest

from tests.cache.failing_cells import KINDS
from tests.cache.operations import OPERATIONS
from tests.cache.verdicts import Tally, cells_of
from tests.faults import HUNG, PythonAllocations, Run, is_full, with_failing_malloc

pytestmark = pytest.mark.slow

POINTS = 1_000_000 if is_full() else 4
# If the process crashes within a call, a new one starts after that point; after several crashes, at the next operation.
MOST_CRASHES = 20 if is_full() else 1


@cache
def tallies(kind, folder):
    """Return the tally of each operation; a point at which the process crashes counts as half done."""
    found = {name: Tally() for name in OPERATIONS}
    waiting = [(cell, 1) for name in OPERATIONS for cell in cells_of(name, few=1)]
    crashes = dict.fromkeys(OPERATIONS, 0)
    while waiting:
        done, point, ran = run_cells(kind, folder, waiting, found)
        if done == len(waiting):
            break
        cell = waiting[done][0]
        kind_of_end = "hung" if ran.returncode == HUNG else "crashed"
        end = f"{kind_of_end}: exit status {ran.returncode}, {' / '.join(ran.stderr.strip().splitlines()[:4])}"
        found[cell.operation].note(cell, Run(True, False, None, f"allocation {point}"), end)
        crashes[cell.operation] += 1
        waiting = [(cell, point + 1), *waiting[done + 1 :]]
        waiting = [each for each in waiting if crashes[each[0].operation] < MOST_CRASHES]
    return found


def run_cells(kind, folder, waiting, found):
    """Run cells in one process until it ends; return the number of finished cells, the last point and the process."""
    lines = [[kind, cell.operation, cell.configuration, cell.situation, first] for cell, first in waiting]
    ran = with_failing_malloc(
        folder,
        ["-m", "tests.cache.failing_cells", str(POINTS)],
        text="".join(json.dumps(line) + "\n" for line in lines),
        timeout=7200 if is_full() else 60,
    )
    done = point = 0
    for line in ran.stdout.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        what, value = json.loads(line)
        if what == "point":
            point = value
        elif what == "verdict":
            found[waiting[done][0].operation].note(waiting[done][0], Run(True, True, None, value[0]), value[1])
        else:
            done, point = done + 1, 0
    assert done == len(waiting) or point, ran.stderr
    return done, point, ran


# Operations that may run without any allocation.
ALLOCATE_NOTHING = {"abandon", "clear_prefix_cache", "commit_after_a_removal"}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_leaves_an_operation_done_or_undone(kind, name, tmp_path_factory):
    if kind != "native":
        PythonAllocations()  # skipped on a machine without them
    tally = tallies(kind, tmp_path_factory.getbasetemp())[name]
    print(f"\n{tally.report(name)}")
    assert tally.points or name in ALLOCATE_NOTHING
    assert tally.num_faults == 0, "\n".join([tally.report(name), *tally.examples[:12]])
