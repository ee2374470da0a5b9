"""A failed allocation at any point of any operation: MemoryError, and the operation is done or undone."""

import importlib.util
import json
from functools import cache

import pytest

from tests.cache.failing_cells import KINDS
from tests.cache.operations import OPERATIONS
from tests.cache.verdicts import Tally, cells_of
from tests.faults import HUNG, PythonAllocations, Run, is_full, with_failing_malloc

pytestmark = pytest.mark.slow

POINTS = 1_000_000 if is_full() else 9
# If the process crashes within a call, a new one starts after that point; after several crashes, at the next operation.
MOST_CRASHES = 20 if is_full() else 1


@cache
def tallies(kinds, folder):
    """Return the tally of each kind and operation; a point at which the process crashes counts as half done."""
    found = {(kind, name): Tally() for kind in kinds for name in OPERATIONS}
    waiting = [(kind, cell, 1) for name in OPERATIONS for cell in cells_of(name, few=1) for kind in kinds]
    crashes = dict.fromkeys(found, 0)
    while waiting:
        done, point, ran = run_cells(folder, waiting, found)
        if done == len(waiting):
            break
        kind, cell, _ = waiting[done]
        kind_of_end = "hung" if ran.returncode == HUNG else "crashed"
        end = f"{kind_of_end}: exit status {ran.returncode}, {' / '.join(ran.stderr.strip().splitlines()[:4])}"
        found[kind, cell.operation].note(cell, Run(True, False, None, f"allocation {point}"), end)
        crashes[kind, cell.operation] += 1
        waiting = [(kind, cell, point + 1), *waiting[done + 1 :]]
        waiting = [each for each in waiting if crashes[each[0], each[1].operation] < MOST_CRASHES]
    return found


def run_cells(folder, waiting, found):
    """Run cells in one process until it ends; return the number of finished cells, the last point and the process."""
    lines = [[kind, cell.operation, cell.configuration, cell.situation, first] for kind, cell, first in waiting]
    ran = with_failing_malloc(
        folder,
        ["-m", "tests.cache.failing_cells", str(POINTS)],
        text="".join(json.dumps(line) + "\n" for line in lines),
        timeout=7200 if is_full() else 120,
    )
    done = point = 0
    for line in ran.stdout.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        what, value = json.loads(line)
        if what == "point":
            point = value
        elif what == "verdict":
            kind, cell, _ = waiting[done]
            found[kind, cell.operation].note(cell, Run(True, True, None, value[0]), value[1])
        else:
            done, point = done + 1, 0
    assert done == len(waiting) or point, ran.stderr
    return done, point, ran


# Operations that may run without any allocation, the last four with the interpreters after Python 3.11.
ALLOCATE_NOTHING = {"abandon", "clear_prefix_cache", "commit_after_a_removal"}
ALLOCATE_NOTHING |= {"remove_idle", "remove_swapped", "exit_of_a_context", "held_from"}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_leaves_an_operation_done_or_undone(kind, name, tmp_path_factory):
    if kind != "native":
        PythonAllocations()  # skipped on a machine without them
    kinds = tuple(KINDS) if importlib.util.find_spec("_testcapi") else ("native",)
    tally = tallies(kinds, tmp_path_factory.getbasetemp())[kind, name]
    print(f"\n{tally.report(name)}")
    assert tally.points or name in ALLOCATE_NOTHING
    assert tally.num_faults == 0, "\n".join([tally.report(name), *tally.examples[:12]])
