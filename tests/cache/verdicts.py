"""Verdicts on faults: a call that failed at any point must be completely done or completely undone."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import product

from pagecore import OutOfBlocks, OutOfRows, PagecoreError
from tests.cache.operations import OPERATIONS
from tests.cache.situations import CONFIGURATIONS, make_world
from tests.cache.state import State, audit, check_invariants, snapshot
from tests.faults import Interrupt, Run, is_full

# Seconds that another thread waits for the lock of a cache.
WAIT = 5.0


@dataclass(frozen=True)
class Cell:
    """One operation in one world."""

    operation: str
    configuration: str
    situation: str

    def ready(self):
        """Return a new world, and the call."""
        world = make_world(self.configuration, self.situation)
        return world, OPERATIONS[self.operation].ready(world)

    def __str__(self):
        return f"{self.operation} / {self.configuration} / {self.situation}"


@dataclass
class Tally:
    """Count of points tried, and the verdicts on those that left an operation half done."""

    points: int = 0
    faults: Counter = field(default_factory=Counter)
    examples: list = field(default_factory=list)

    def note(self, cell, run, problem):
        self.points += 1
        if problem:
            self.faults[problem.split(":")[0]] += 1
            self.examples.append(f"{cell}, {run.where}: {problem}")

    @property
    def num_faults(self):
        return sum(self.faults.values())

    def report(self, name):
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
        return f"{name}: {self.points} points, {self.num_faults} half done{f' ({kinds})' if kinds else ''}"


def cells_of(name, few=2) -> list[Cell]:
    """Return the worlds in which an operation is tried: all, or a few that differ between operations."""
    operation = OPERATIONS[name]
    configurations = [
        key
        for key, (layers, _, options) in CONFIGURATIONS.items()
        if (operation.windows or not has_window(layers)) and not (operation.bytes and options.get("device") == "none")
    ]
    cells = [Cell(name, *pair) for pair in product(configurations, operation.situations)]
    if is_full() or len(cells) <= few:
        return cells
    offset = list(OPERATIONS).index(name)
    return [cells[(offset + i * len(cells) // few) % len(cells)] for i in range(few)]


def has_window(layers):
    return any(spec.window is not None for spec in (layers if isinstance(layers, list) else [layers]))


def spread(total: int, most: int, turn: int = 0) -> Iterator[int]:
    """Return the points 1 to `total`: all, or `most` evenly spaced ones, which differ from turn to turn."""
    if is_full() or total <= most:
        yield from range(1, total + 1)
    else:
        offset = turn * 0.618 % 1
        yield from (1 + int((i + offset) * total / most) for i in range(most))


def outcome(cell: Cell, run: Callable[[Callable[[], object]], object] = lambda call: call()) -> tuple[State, State]:
    """Return the states before and after an undisturbed call, which `run` makes."""
    world, call = cell.ready()
    before = snapshot(world)
    run(call)
    check_invariants(world)
    after = snapshot(world)
    audit(world)
    return before, after


def judge(
    cell: Cell,
    states: tuple[State, State],
    inject: Callable[[Callable[[], object]], Run],
    *,
    may_lack_memory: bool = False,
) -> tuple[Run, str]:
    """Run the call of a new world with a fault; return the run, and a description of the problem or None.

    With `may_lack_memory` the prefix cache may contain less than after an undisturbed call, because an allocation
    failed; the error must then be one of memory.
    """
    world, call = cell.ready()
    run = inject(call)
    try:
        problem = wrong_error(run, may_lack_memory) or _verdict(cell, world, call, run, states, may_lack_memory)
    except PagecoreError as error:
        problem = f"broken: {type(error).__name__}: {error}"
    except AssertionError as error:
        problem = f"broken: {error}"
    return run, problem


def wrong_error(run, may_lack_memory):
    if run.error is None:
        return ""
    kind, message = run.error
    if not may_lack_memory:
        return "" if issubclass(kind, Interrupt | KeyboardInterrupt) else f"wrong error: {kind.__name__}: {message}"
    if issubclass(kind, MemoryError) and not issubclass(kind, OutOfBlocks | OutOfRows):
        return ""
    # Errors of NumPy functions whose allocation failed.
    if kind is SystemError and ("without exception set" in message or "without setting an exception" in message):
        return ""
    return f"wrong error: {kind.__name__}: {message}"


def _verdict(cell, world, call, run, states, may_lack_memory):
    before, after = states
    if is_locked(world.cache):
        return "locked: another thread waits for the cache for ever"
    check_invariants(world)
    now = snapshot(world)
    is_done = same_end(now, after, may_lack_memory)
    if now.exact != before.exact and not is_done and now.exact == lost_batch(cell):
        audit(world)
        return ""
    if now.exact != before.exact and not is_done and not (may_lack_memory and has_evicted(now, before)):
        return f"half done: {differences(now, before)} | {differences(now, after)}"
    if run.finished and not is_done:
        return "not done: the call returned and did nothing"
    if not is_done:
        call()
        check_invariants(world)
        again = snapshot(world)
        if not same_end(again, after, may_lack_memory=False):
            return f"not repeatable: {differences(again, after)}"
    audit(world)
    return ""


def lost_batch(cell: Cell) -> object:
    """Return the state after a prepare whose new batch was collected: an interrupt on its return loses the batch."""
    if cell.operation not in ("prepare", "prepare_arrival"):
        return None
    world, call = cell.ready()
    call()
    world.cache.abandon(world.batches.pop("new"))
    return snapshot(world).exact


def is_locked(cache):
    """Return True if a call did not release the lock of a cache."""
    done = threading.Event()

    def use():
        try:
            cache.stats()
        except Exception:  # other checks report the problem
            return
        finally:
            done.set()

    threading.Thread(target=use, daemon=True).start()
    return not done.wait(WAIT)


def same_end(now, after, may_lack_memory):
    """Return True if the call was done; its new batch may be lost with the return value."""
    batches_fit = now.batches in (after.batches, after.batches[: len(now.batches)])
    if not batches_fit:
        return False
    if now.canonical == after.canonical:
        return True
    knows_no_more = all(one <= other for one, other in zip(now.hits, after.hits, strict=True))
    return may_lack_memory and now.own == after.own and knows_no_more


def has_evicted(now, before):
    """Return True if the failed call changed nothing but evicting cached blocks."""
    return now.own == before.own and all(one <= other for one, other in zip(now.hits, before.hits, strict=True))


def differences(one, other):
    """Return the first parts in which two states differ."""
    found = []
    for part in ("canonical", "batches", "exact"):
        if found:
            break
        for a, b in zip(flat(getattr(one, part)), flat(getattr(other, part)), strict=False):
            if a != b:
                found.append(f"{a} for {b}")
    return "; ".join(found[:4])


def flat(value):
    """Yield the leaves of nested tuples and lists."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from flat(part)
    elif hasattr(value, "__dataclass_fields__"):
        for each in fields(value):
            yield f"{each.name}={getattr(value, each.name)}"
    else:
        yield value
