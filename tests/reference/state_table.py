"""StateTable in plain Python; a call that fails half way restores a saved copy of the state."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    OutOfBlocks,
    PagecoreError,
    ShapeError,
    UnsupportedOption,
)
from tests.reference.block_pool import BlockPool
from tests.reference.block_tables import BlockTables

NO_END = 2**31 - 1


@dataclass
class Step:
    count: int
    keeps: bool
    written: list[int] = field(default_factory=list)  # slots, after each token of a decode step
    planned: int = 0  # slot of a checkpoint inside a prefill
    is_fresh: bool = False
    source: int = 0
    took_spare: bool = False
    reserved: int = 0  # slot for the step's quantised checkpoint


@dataclass
class State:
    length: int = 0
    running: int = 0
    spare: int = 0
    resting: int = 0  # slot of a quantised checkpoint from which the next step begins
    checkpoint: int = 0
    checkpoint_length: int = 0
    branch: int = 0  # tokens whose keys and values others share
    end: int = NO_END  # tokens up to which an equal sequence could find it
    step: Step | None = None


def checkpoint_length(
    before: int,
    count: int,
    chunk: int,
    interval: int,
    block: int,
    drafts: int,
    branch: int = 0,
    delay: int = 0,
    end: int = NO_END,
) -> int:
    """Return the length at which a step keeps a checkpoint, by trying every length."""
    grid = math.lcm(chunk, interval, block)
    if delay:
        grid = next(n for n in itertools.count(grid, grid) if n > delay + drafts)
    is_end = count > 0 and not delay and (before + count) % math.lcm(chunk, block) == 0
    if count <= 1 + drafts:
        if is_end and before + count <= end < NO_END:
            return before + count
        return max((n for n in range(before + 1, before + count + 1) if n % grid == 0), default=0)
    possible = [n for n in range(before + chunk, before + count + 1, chunk) if n % block == 0]
    lengths = [n for n in possible if n <= before + count - delay] + [before + count] * is_end
    lengths = [n for n in lengths if n <= branch] or [n for n in lengths if n <= end] or lengths
    if delay and not lengths:
        wide = next(n for n in itertools.count(grid, grid) if n > 2 * delay + math.lcm(chunk, block))
        last = (before + count) // wide * wide
        lengths = [last] if last in possible or last == before + count else []
    return max(lengths, default=0)


class StateTable:
    """Twin of `pagecore.index.StateTable`, with the twin of its block tables; lists in, lists out.

    Quantised checkpoints have a pool of their own; otherwise `checkpoints` is `slots`.
    """

    def __init__(
        self,
        tables: BlockTables,
        num_slots: int,
        chunk: int,
        interval: int,
        in_place: bool,
        draft_tokens: int,
        num_checkpoints: int | None = None,
    ):
        self.tables = tables
        self.slots = BlockPool(num_slots)
        self.quantises = num_checkpoints is not None
        self.checkpoints = self.slots if num_checkpoints is None else BlockPool(num_checkpoints)
        self.grid = (chunk, interval, math.lcm(*tables.block_sizes), draft_tokens)
        self.drafts = draft_tokens
        self.in_place = in_place
        self.states: dict[int, State] = {}

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        saved = copy.deepcopy((self.states, vars(self.slots), vars(self.checkpoints)))
        with self.tables.all_or_nothing():
            try:
                yield
            except Exception:
                self.states = saved[0]
                vars(self.slots).update(saved[1])
                vars(self.checkpoints).update(saved[2] if self.quantises else saved[1])
                raise

    # Parts.

    def used(self, rows: list[int]) -> list[State]:
        if len(set(rows)) < len(rows) or not set(rows) <= set(self.states):
            raise InvalidSequence(str(rows))
        return [self.states[row] for row in rows]

    def idle(self, rows: list[int]) -> list[State]:
        states = self.used(rows)
        if any(state.step for state in states):
            raise InvalidSequence("in flight")
        return states

    def in_flight(self, rows: list[int]) -> list[State]:
        states = self.used(rows)
        if not all(state.step for state in states):
            raise InvalidSequence("idle")
        return states

    def share(self, slot: int) -> int:
        if slot:
            self.slots.share([slot])
        return slot

    def drop(self, *slots: int) -> None:
        for slot in slots:
            if slot:
                self.slots.free([slot])

    def share_kept(self, slot: int) -> int:
        if slot:
            self.checkpoints.share([slot])
        return slot

    def drop_kept(self, *slots: int) -> None:
        for slot in slots:
            if slot:
                self.checkpoints.free([slot])

    def take(self, pool: BlockPool | None = None) -> int:
        pool = pool or self.slots
        if not pool.num_free:
            raise OutOfBlocks("slots")
        return pool.take()

    def share_all(self, state: State) -> None:
        self.share(state.running)
        self.share_kept(state.resting)
        self.share_kept(state.checkpoint)

    def kept(self, state: State, count: int) -> int:
        return checkpoint_length(state.length, count, *self.grid, state.branch, end=state.end)

    # Rows.

    def add(self, prefix: list[list[int]] | None = None, state: int = 0, computed: int | None = None) -> int:
        with self.all_or_nothing():
            row = self.tables.add(prefix, computed)
            length, shared_to = self.tables.rows[row].length, self.tables.rows[row].shared_to
            if not 0 <= state < self.checkpoints.num_blocks:
                raise InvalidBlock(str(state))
            if (length == 0) != (state == 0):
                raise ShapeError(str(state))
            if state and not self.checkpoints.holders[state]:
                raise DoubleFree(str(state))
            added = State(length, checkpoint=state, checkpoint_length=length, branch=max(shared_to))
            added.running, added.resting = (0, state) if self.quantises else (state, 0)
            self.share_all(added)
            self.states[row] = added
        return row

    def fork(self, row: int) -> int:
        (parent,) = self.idle([row])
        child = self.tables.fork(row)
        self.states[child] = replace(parent, spare=0)
        self.share_all(parent)
        return child

    def remove(self, rows: list[int]) -> None:
        states = self.used(rows)
        self.tables.remove(rows)
        for row, state in zip(rows, states, strict=True):
            self.clear(state)
            del self.states[row]

    def clear(self, state: State) -> None:
        if step := state.step:
            self.drop(*reversed(step.written[self.in_place :]), step.planned)
            self.drop_kept(step.reserved)
        self.drop_kept(state.checkpoint, state.resting)
        self.drop(state.spare, state.running)
        state.__init__()  # type: ignore[misc]

    def reorder(self, rows: list[int], parents: list[int]) -> None:
        if len(rows) != len(parents):
            raise ShapeError(str(parents))
        for parent in parents:
            self.idle([parent])
        self.idle(rows)
        before = {parent: copy.copy(self.states[parent]) for parent in parents}
        self.tables.reorder(rows, parents)
        moved = [(self.states[row], before[parent]) for row, parent in zip(rows, parents, strict=True) if row != parent]
        for _, source in moved:
            self.share_all(source)
        for state, source in moved:
            self.drop_kept(state.checkpoint, state.resting)
            self.drop(state.running)
            state.length, state.running, state.resting = source.length, source.running, source.resting
            state.checkpoint, state.checkpoint_length = source.checkpoint, source.checkpoint_length
            state.branch, state.end = source.branch, source.end

    def truncate(self, rows: list[int], lengths: list[int], keep_capacity: bool = False) -> None:
        states = self.idle(rows)
        for state, length in zip(states, lengths, strict=True):
            if length not in {0, state.length} | ({state.checkpoint_length} if state.checkpoint else set()):
                raise ShapeError(str(length))
        self.tables.truncate(rows, lengths, keep_capacity)
        for state, length in zip(states, lengths, strict=True):
            state.branch = min(state.branch, length)
            if length == state.length:
                continue
            if length == 0:
                self.clear(state)
            else:
                self.go_back(state)

    def go_back(self, state: State) -> None:
        self.share_kept(state.checkpoint)
        self.drop(state.running)
        self.drop_kept(state.resting)
        state.running, state.resting = (0, state.checkpoint) if self.quantises else (state.checkpoint, 0)
        state.length = state.checkpoint_length

    def set_ends(self, rows: list[int], ends: list[int]) -> None:
        for state, end in zip(self.idle(rows), ends, strict=True):
            state.end = end

    def drop_checkpoints(self, rows: list[int]) -> int:
        states = self.idle(rows)
        before = self.checkpoints.num_free
        for state in states:
            self.drop_kept(state.checkpoint)
            state.checkpoint = state.checkpoint_length = 0
        return self.checkpoints.num_free - before

    def resume_length(self, row: int, length: int) -> int:
        (state,) = self.used([row])
        return max(n for n in (0, state.checkpoint_length, state.length) if n <= length)

    # Steps.

    def prepare(self, rows: list[int], counts: list[int], keep_checkpoints: bool = True) -> dict[str, list[object]]:
        """Return the contents of the buffers, without padding."""
        self.idle(rows)
        self.tables.check_step(rows, counts)
        found: dict[str, list[object]] = {
            name: [] for name in ("read", "write", "checkpoints", "lengths", "drafts", "zeros", "copies", "loads")
        }
        with self.all_or_nothing():
            for row, count in zip(rows, counts, strict=True):
                self.begin(self.states[row], Step(count, keep_checkpoints), found)
            found["slots"] = list(self.tables.extend(rows, counts))
        return found

    def shortage(self, rows: list[int], counts: list[int], keep_checkpoints: bool = True) -> int:
        self.idle(rows)
        self.tables.check_step(rows, counts)
        trial = copy.deepcopy(self)
        pools = [(self.slots, trial.slots), (self.checkpoints, trial.checkpoints)][: 1 + self.quantises]
        for own, other in pools:
            other.free_ids.extendleft(range(10**6, 10**6 + 1000))  # invented slots, taken last
            other.holders = dict(enumerate(own.holders))  # type: ignore[assignment]
        before = [len(other.free_ids) for _, other in pools]
        found: dict[str, list[object]] = {
            name: [] for name in ("read", "write", "checkpoints", "lengths", "drafts", "zeros", "copies", "loads")
        }
        for row, count in zip(rows, counts, strict=True):
            trial.begin(trial.states[row], Step(count, keep_checkpoints), found)
        taken = [count - len(other.free_ids) for count, (_, other) in zip(before, pools, strict=True)]
        return sum(max(0, count - own.num_free) for count, (own, _) in zip(taken, pools, strict=True))

    def begin(self, state: State, step: Step, found: dict[str, list[object]]) -> None:
        state.step = step
        is_decode = step.count <= 1 + self.drafts
        kept = self.kept(state, step.count) if step.keeps and step.count else 0
        if step.count:
            self.take_slots(state, step, found)
            step.written += [self.take() for _ in range(step.count - 1 if is_decode else 0)]
            if kept and not is_decode and kept < state.length + step.count:
                step.planned = self.take()
            if kept and self.quantises:
                step.reserved = self.take(self.checkpoints)
        found["read"].append(state.running if step.count else 0)
        found["write"].append(step.written[-1] if step.count else 0)
        found["lengths"].append(kept)
        of_token = step.written[kept - state.length - 1] if kept and is_decode else step.written[0] if kept else 0
        found["checkpoints"].append(step.planned or of_token)
        drafts = step.written if is_decode else []
        found["drafts"].append(drafts + [0] * (1 + self.drafts - len(drafts)))

    def take_slots(self, state: State, step: Step, found: dict[str, list[object]]) -> None:
        """Make the running slot readable, and in place writable; take the first slot that the step writes."""
        if not state.running:
            state.running, step.is_fresh = self.take(), True
            if state.resting:
                found["loads"].append((state.resting, state.running))
            else:
                found["zeros"].append(state.running)
        elif self.in_place and self.slots.holders[state.running] > 1:
            step.source, state.running = state.running, self.take()
            self.drop(step.source)
            found["copies"].append((step.source, state.running))
        if self.in_place:
            step.written = [state.running]
        else:
            step.took_spare = not state.spare
            step.written = [state.spare or self.take()]
            state.spare = 0

    def accepted(self, rows: list[int], accepted: list[int] | None) -> tuple[list[State], list[int]]:
        """Return the states of rows in flight and the tokens that stay, both checked."""
        states = self.in_flight(rows)
        counts = [state.step.count for state in states if state.step]
        given = counts if accepted is None else accepted
        for count, stays in zip(counts, given, strict=True):
            if not 0 <= stays <= count:
                raise ShapeError(str(stays))
            if stays < count and not (count <= 1 + self.drafts if stays else not self.in_place):
                raise UnsupportedOption(str(stays))
        return states, given

    def saves(self, rows: list[int], accepted: list[int] | None = None) -> list[list[int]]:
        """Return (slot, checkpoint) of each quantised checkpoint that `commit` will keep."""
        found = []
        for state, stays in zip(*self.accepted(rows, accepted), strict=True):
            step = state.step
            if self.quantises and step and (kept := self.kept_by(state, step, stays)):
                at_token = step.written[kept - state.length - 1 if len(step.written) > 1 else 0]
                found.append([step.planned or at_token, step.reserved])
        return found

    def kept_by(self, state: State, step: Step, accepted: int) -> int:
        """Return the length of the checkpoint that a step keeps if some of its tokens stay; 0 for none."""
        if not step.keeps or not accepted:
            return 0
        if accepted < step.count:  # a part of a prompt is accepted whole
            return checkpoint_length(state.length, accepted, *self.grid)
        return self.kept(state, accepted)

    def commit(self, rows: list[int], accepted: list[int] | None = None) -> None:
        states, given = self.accepted(rows, accepted)
        lengths = [state.length + stays for state, stays in zip(states, given, strict=True)]
        self.tables.truncate(rows, lengths, keep_capacity=True)
        for state, stays in zip(states, given, strict=True):
            self.keep(state, stays)

    def keep(self, state: State, accepted: int) -> None:
        step, state.step = state.step, None
        if step is None or not step.count:
            return
        is_decode = step.count <= 1 + self.drafts
        left = list(step.written)
        old = 0 if self.in_place else state.running
        if accepted:
            at = accepted - 1 if is_decode else 0
            state.running, left[at] = left[at], 0
        else:
            old = 0
        kept = self.kept_by(state, step, accepted)
        if kept:
            if self.quantises:
                slot, step.reserved = step.reserved, 0
            elif kept == state.length + accepted:
                slot = self.share(state.running)
            elif is_decode:
                slot, left[kept - state.length - 1] = left[kept - state.length - 1], 0
            else:
                slot, step.planned = step.planned, 0
            self.drop_kept(state.checkpoint)
            state.checkpoint, state.checkpoint_length = slot, kept
        state.length += accepted
        if accepted < step.count:
            state.branch = min(state.branch, state.length)
        if old and self.slots.holders[old] == 1:
            state.spare = old
        else:
            self.drop(old)
            if not self.in_place:
                state.spare = next((slot for slot in left if slot), 0)
                left = [0 if slot == state.spare else slot for slot in left]
        self.drop(*reversed(left), step.planned)
        self.drop_kept(state.resting, step.reserved)
        state.resting = 0

    def abandon(self, rows: list[int]) -> list[int]:
        states = self.in_flight(rows)
        lengths = [
            state.checkpoint_length
            if self.in_place and state.step and state.step.count and not state.resting
            else state.length
            for state in states
        ]
        self.tables.truncate(rows, lengths)
        for state in states:
            step, state.step = state.step, None
            if step and step.count:
                self.drop(step.planned, *reversed(step.written[1:]))
                self.drop_kept(step.reserved)
                if not self.in_place:
                    state.spare = step.written[0]
                    self.drop_kept(state.resting)
                    state.resting = 0
                elif state.resting:
                    self.drop(state.running)
                    state.running = 0
                else:
                    self.go_back(state)
            state.branch = min(state.branch, state.length)
        return lengths

    def undo(self, rows: list[int]) -> list[int]:
        states = self.in_flight(rows)
        lengths = [state.length for state in states]
        self.tables.truncate(rows, lengths)
        for state in reversed(states):
            step, state.step = state.step, None
            if step and step.count:
                self.drop(step.planned, *reversed(step.written[1:]))
                self.drop_kept(step.reserved)
                if not self.in_place:
                    state.spare = 0 if step.took_spare else step.written[0]
                    self.drop(step.written[0] if step.took_spare else 0)
                if step.is_fresh or step.source:
                    self.share(step.source)
                    self.drop(state.running)
                    state.running = step.source
            state.branch = min(state.branch, state.length)
        return lengths

    # Contents.

    def length(self, row: int) -> int:
        return self.used([row])[0].length

    def slot(self, row: int) -> int:
        return self.used([row])[0].running

    def resting(self, row: int) -> int:
        return self.used([row])[0].resting

    def checkpoint(self, row: int) -> tuple[int, int] | None:
        (state,) = self.used([row])
        return (state.checkpoint, state.checkpoint_length) if state.checkpoint else None


__all__ = ["PagecoreError", "StateTable", "checkpoint_length"]
