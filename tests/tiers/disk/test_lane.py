"""The index of a lane against a twin that keeps every slot, pin and use in plain lists."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagecore.errors import PagecoreError
from pagecore.tiers.disk.lane import Lane
from tests.faults import fail_allocation, is_full, runs
from tests.machines import drawn

SLOTS = 5
KEYS = st.integers(0, 9).map(lambda n: bytes([n]) * 17)


class LaneMachine(RuleBasedStateMachine):
    """`where` has the place of each key; `uses` the published unpinned keys, the least recently used first.

    `before` has the key that a key follows. `passed` has the keys that are not in `uses`, because others follow them.
    """

    def __init__(self):
        super().__init__()
        self.lane = Lane(SLOTS, {})
        self.slot, self.where, self.uses = {}, {}, []
        self.before, self.passed = {}, []
        self.lookups, self.loads = [], []
        self.gone = None  # before the first call that takes evictions

    def pins(self, key):
        return self.lookups.count(key) + self.loads.count(key)

    def rest(self, key):
        """Make a key without pins the most recently used, or free the slot of a dropped one."""
        if self.pins(key):
            return
        if self.where[key] == "dropped":
            del self.where[key], self.slot[key]
        else:
            self.uses.append(key)

    def is_followed(self, key):
        return key in self.before.values()

    def leave(self, key):
        """Make a key follow nothing."""
        other = self.before.pop(key, None)
        if other in self.passed and not self.is_followed(other):
            self.passed.remove(other)
            self.uses.insert(0, other)

    def withdraw(self, key):
        """Keep a key from being evicted."""
        for keys in (self.uses, self.passed):
            if key in keys:
                keys.remove(key)

    def victim(self, kept):
        at = 0
        while at < len(self.uses):
            if self.is_followed(self.uses[at]):
                self.passed.append(self.uses.pop(at))
            elif self.uses[at] == kept:
                at = 1
            else:
                return self.uses.pop(at)
        return None

    def lose(self, key):
        if self.gone is not None:
            self.gone.add(key)

    @rule()
    def take_evicted(self):
        taken = self.lane.take_evicted()
        assert sorted(taken) == sorted(self.gone or ())
        self.gone = set()

    def follow(self, key, before):
        other = before
        while other is not None and other != key:
            other = self.before.get(other)
        if other is None:
            self.before[key] = before

    @rule(key=KEYS, before=st.none() | KEYS)
    def take(self, key, before):
        if self.where.get(key) in ("published", "writing"):
            return
        slot = self.lane.take(key, before)
        if key in self.where or (before is not None and self.where.get(before) not in ("published", "writing")):
            assert slot is None
            return
        victim = None
        if len(self.where) == SLOTS:
            victim = self.victim(before)
            if victim is None:
                assert slot is None
                return
        if before is not None:
            self.follow(key, before)
        if victim is not None:
            self.leave(victim)
            assert slot == self.slot.pop(victim)
            del self.where[victim]
            self.lose(victim)
        assert slot not in self.slot.values()
        self.slot[key], self.where[key] = slot, "writing"

    @rule(key=KEYS)
    def touch(self, key):
        self.lane.touch(key)
        if key in self.uses or key in self.passed:
            self.withdraw(key)
            self.uses.append(key)

    @rule(key=KEYS, is_written=st.booleans())
    def end_write(self, key, is_written):
        if self.where.get(key) != "writing":
            return
        if is_written:
            self.lane.publish(key)
            if self.gone is not None:
                self.gone.discard(key)
            self.where[key] = "published"
            self.uses.append(key)
        else:
            self.lane.abandon(key)
            self.leave(key)
            del self.where[key], self.slot[key]

    @rule(key=KEYS)
    def look_up(self, key):
        is_there = self.where.get(key) == "published"
        assert self.lane.hold(key) == is_there
        if is_there:
            self.withdraw(key)
            self.lookups.append(key)

    @rule(key=KEYS)
    def unlock(self, key):
        self.lane.unhold(key)
        if key in self.lookups:
            self.lookups.remove(key)
            self.rest(key)

    @rule(key=KEYS)
    def start_load(self, key):
        slot = self.lane.pin_for_load(key)
        if self.where.get(key) != "published":
            assert slot is None
            if key in self.lookups:
                self.lookups.remove(key)
                self.rest(key)
            return
        assert slot == self.slot[key]
        if key in self.lookups:
            self.lookups.remove(key)
        self.withdraw(key)
        self.loads.append(key)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_load(self, data, is_whole):
        key = data.draw(st.sampled_from(self.loads))
        if not is_whole:
            expected = self.slot[key] if self.where[key] == "published" else None
            assert self.lane.drop(key) == expected
            if expected is not None:
                self.lose(key)
                self.leave(key)
            self.where[key] = "dropped"
        self.lane.unpin(key)
        self.loads.remove(key)
        self.rest(key)

    @rule(key=KEYS)
    def pin(self, key):
        """A store finds the key; `end_load` ends its pin, too."""
        is_there = self.where.get(key) == "published"
        assert self.lane.pin(key) == is_there
        if is_there:
            self.withdraw(key)
            self.loads.append(key)

    @rule(key=KEYS)
    def drop(self, key):
        if self.where.get(key) != "published":
            assert self.lane.drop(key) is None
            return
        assert self.lane.drop(key) == self.slot[key]
        self.lose(key)
        self.where[key] = "dropped"
        self.leave(key)
        self.withdraw(key)
        if not self.pins(key):
            del self.where[key], self.slot[key]

    @invariant()
    def agrees(self):
        self.lane.check_invariants()
        published = {key: self.slot[key] for key, place in self.where.items() if place == "published"}
        assert self.lane.entries == published
        assert self.lane.held.total() == len(self.lookups)


TestLane = pytest.mark.slow(drawn(LaneMachine))
TestLane.settings = settings(max_examples=60 if is_full() else 34, stateful_step_count=40, deadline=None)


def test_a_reopened_lane_evicts_its_oldest_entries_first():
    lane = Lane(4, {b"b" * 17: 2, b"a" * 17: 0})
    assert [lane.take(bytes([n]) * 17) for n in range(5)] == [1, 3, 2, 0, None]
    lane.check_invariants()


def test_a_reopened_lane_evicts_an_entry_before_the_one_that_it_follows():
    first, second, third = (bytes([n]) * 17 for n in range(3))
    lane = Lane(3, {first: 0, second: 1, third: 2}, {second: first, third: second})
    assert [lane.take(bytes([n]) * 17) for n in range(3, 7)] == [2, 1, 0, None]
    lane.check_invariants()


def test_an_entry_comes_first_again_when_its_last_follower_has_gone():
    first, second, other = (bytes([n]) * 17 for n in range(3))
    lane = Lane(3, {first: 0, second: 1, other: 2}, {second: first})
    assert [lane.take(bytes([n]) * 17) for n in range(3, 6)] == [1, 0, 2]
    lane.check_invariants()


def test_an_entry_whose_follower_was_lost_may_be_evicted():
    first, second, other = (bytes([n]) * 17 for n in range(3))
    lane = Lane(2, {first: 0, second: 1}, {second: first})
    assert lane.drop(second) == 1
    assert [lane.take(other), lane.take(bytes([3]) * 17)] == [1, 0]
    lane.check_invariants()


def test_links_close_no_circle_when_a_lost_entry_comes_back():
    one, two, other = (bytes([n]) * 17 for n in range(3))
    lane = Lane(2, {one: 0, two: 1}, {two: one})
    lane.drop(one)
    assert lane.take(one, before=two) == 0
    lane.publish(one)
    assert lane.take(other) == 1
    lane.check_invariants()


def test_entries_come_in_the_order_of_uses_after_an_interrupt():
    keys = [bytes([n]) * 17 for n in range(9)]
    lane = Lane(8, {key: slot for slot, key in enumerate(keys[:6])})
    assert [lane.take(keys[6], before=keys[0]), lane.take(keys[7], before=keys[1])] == [6, 7]
    assert lane.take(keys[8]) == 2  # passes over the first two, which have followers
    lane.recover(Counter(), ())
    assert list(lane.slots_by_use()) == [0, 1, 3, 4, 5]
    for key in (keys[4], keys[0], keys[3]):
        lane.pin(key)
    lane.recover(Counter(), ())
    assert list(lane.slots_by_use()) == [1, 5, 0, 3, 4]
    lane.check_invariants()


@pytest.mark.parametrize("damage", ["entries", "writing", "held"])
def test_inconsistent_lanes_are_noticed(damage):
    lane = Lane(4, {b"a" * 17: 0})
    if damage == "entries":
        lane.entries[b"b" * 17] = 0
    elif damage == "writing":
        lane.writing[b"b" * 17] = 3
    else:
        lane.held[b"a" * 17] = 1
    with pytest.raises(PagecoreError, match="inconsistent"):
        lane.check_invariants()


def test_evictions_follow_the_exact_order_of_uses():
    count = 3000
    keys = [int(n).to_bytes(17, "little") for n in np.random.default_rng(0).permutation(2 * count)]
    lane = Lane(count, {})
    for key in keys[:count]:
        lane.take(key)
        lane.publish(key)
    for old, key in zip(keys[:count], keys[count:], strict=True):
        assert old in lane.entries
        lane.take(key)
        assert old not in lane.entries
        lane.publish(key)


def full_lane():
    """Return a lane without a free slot, whose oldest entry is followed, and three keys: oldest, its follower, new."""
    keys = [bytes([n]) * 17 for n in range(4)]
    lane = Lane(3, {key: slot for slot, key in enumerate(keys[:3])}, {keys[1]: keys[0]})
    lane.take_evicted()
    return lane, keys


def lane_of_one():
    keys = [bytes([n]) * 17 for n in range(2)]
    lane = Lane(1, {keys[0]: 0})
    lane.take_evicted()
    return lane, keys


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lane_of_one, lambda lane, keys: lane.take(keys[1], before=keys[0])),
        (full_lane, lambda lane, keys: lane.take(keys[3], before=keys[0])),
        (full_lane, lambda lane, keys: lane.take(keys[3])),
        (full_lane, lambda lane, keys: lane.drop(keys[1])),
        (full_lane, lambda lane, keys: lane.remove(keys[1])),
        (full_lane, lambda lane, keys: lane.hold(keys[0]) and lane.unhold(keys[0])),
    ],
    ids=["refused", "linked", "evict", "drop", "remove", "unhold"],
)
def test_a_call_without_memory_can_be_made_again(make, call, count):
    lane, keys = make()
    expected = call(lane, keys), lane.entries, lane.writing, lane.take_evicted()

    def called(n):
        nonlocal lane, keys
        lane, keys = make()
        return fail_allocation(lambda: call(lane, keys), n, count=count)

    for run in runs(called):
        lane.check_invariants()
        assert not lane._evicted.keys() & lane.entries.keys()
        if not run.finished:
            lane.unhold(keys[0])
            assert (call(lane, keys), lane.entries, lane.writing, lane.take_evicted()) == expected, run.where
            lane.check_invariants()
            assert not lane.held
            assert lane._pins.keys() == lane.orphans.keys()
