"""The least number of tokens that a running run has left, which is counted only where that saves time."""

import random

from pagecore.serving.scheduling.least_left import PAUSE_MAX, WORTHWHILE, LeastLeft


def test_a_bound_is_never_more_than_the_runs_have_left():
    choice = random.Random(5)
    for longest in (3, 30, 300):
        least, lefts = LeastLeft(), []
        for _ in range(600):
            if len(lefts) < 8:
                lefts.append(choice.randint(1, longest))
                least = least.with_run(lefts[-1])
            most = min(choice.randint(1, 3), *lefts)
            before = min(lefts)
            least = least.after(most, lambda before=before: before)
            lefts = [left - choice.randint(0, most) for left in lefts]
            assert least.bound <= min(lefts)
            lefts = [left for left in lefts if left]


def test_runs_are_counted_once_while_the_bound_lasts():
    least, counts = LeastLeft(), []
    for left in range(100, 1, -1):
        least = least.after(1, lambda left=left: counts.append(left) or left)
        assert least.bound == left - 1
    assert counts == [100]


def test_counts_that_find_little_become_rare():
    least, counts = LeastLeft(), []
    for accept in range(2000):
        least = least.after(1, lambda accept=accept: counts.append(accept) or 1)
    assert len(counts) < 8 + 2000 // PAUSE_MAX
    while least.bound == 0:
        least = least.after(1, lambda: WORTHWHILE + 1)
    assert least == LeastLeft(WORTHWHILE)
