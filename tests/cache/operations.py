"""Every operation of the paged cache, as a call that is ready to run in a world."""

from dataclasses import dataclass

import numpy as np

from pagecore import SwapSpace
from tests.cache.situations import NAMED, OTHER, PROMPT, SITUATIONS
from tests.cache.state import fill

OPERATIONS = {}


@dataclass(frozen=True)
class Operation:
    """A named call.

    Attributes
    ----------
    ready : callable
        Prepares a world and returns the call. A call that failed can be repeated.
    situations : tuple of str
        Situations in which the call takes a path of its own.
    reads : bool
        The call changes nothing.
    windows : bool
        The call is allowed in caches with windows.
    bytes : bool
        The call needs a cache with bytes.
    """

    ready: object
    situations: tuple = SITUATIONS
    reads: bool = False
    windows: bool = True
    bytes: bool = False


def operation(**options):
    def register(ready):
        OPERATIONS[ready.__name__] = Operation(ready, **options)
        return ready

    return register


def kept(world, call):
    """Return the call with its result stored in the world, as a user would store it."""

    def run():
        world.sequences["new"] = call()

    return run


# -- sequences ---------------------------------------------------------------------------------------------------------


@operation(situations=("shared", "short"))
def add_sequence_without_hits(world):
    return kept(world, lambda: world.cache.add_sequence(range(900, 910), "new"))


@operation(situations=("shared", "doubled", "short"))
def add_sequence_with_hits(world):
    return kept(world, lambda: world.cache.add_sequence(PROMPT[:19], "new"))


@operation(situations=("named",))
def add_sequence_with_hits_in_a_namespace(world):
    world.kinds["new"] = NAMED["namespace"], NAMED["spans"]
    return kept(world, lambda: world.cache.add_sequence([*PROMPT[:14], 9, 9], "new", **NAMED))


@operation()
def fork(world):
    world.kinds["new"] = world.kinds["x"]
    return kept(world, lambda: world.cache.fork(world.x, "new"))


@operation()
def reorder_swaps_two(world):
    return lambda: world.cache.reorder([world.x, world.y], [world.y, world.x])


@operation()
def reorder_copies_one(world):
    return lambda: world.cache.reorder([world.x, world.y], [world.y, world.y])


@operation()
def truncate_by_one(world):
    return lambda: world.cache.truncate([world.x, world.y], 13)


@operation()
def truncate_to_nothing(world):
    return lambda: world.cache.truncate([world.x, world.y], [0, 0])


@operation(windows=False)
def truncate_inside_blocks(world):
    return lambda: world.cache.truncate([world.x, world.y], [6, 9])


def compaction(world, name, keep):
    sequence = world.sequences[name]
    world.compacted[sequence.id] = [*sequence.tokens.tolist(), *world.future.get(sequence.id, ())], keep
    return lambda: world.cache.compact(sequence, keep)


@operation(windows=False)
def compact(world):
    return compaction(world, "x", [0, 1, 2, 3, 4, 7, 9, 12, 13])


@operation(windows=False)
def compact_from_the_start(world):
    return compaction(world, "y", [1, 6, 7])


@operation(situations=("shared",), windows=False)
def compact_with_late_ids(world):
    return compaction(world, "w", [0, 2, 4])


@operation()
def remove_idle(world):
    return lambda: world.cache.remove(world.x)


@operation(situations=("shared", "short"))
def remove_in_flight(world):
    return lambda: world.cache.remove(world.z)


@operation(situations=("shared", "short"))
def remove_swapped(world):
    return lambda: world.cache.remove(world.s)


@operation(situations=("shared",))
def remove_with_late_ids(world):
    world.cache.append_tokens([world.w], [[24]])
    return lambda: world.cache.remove(world.w)


@operation(situations=("shared", "cut"))
def exit_of_a_context(world):
    return lambda: world.x.__exit__(None, None, None)


@operation(situations=("shared",))
def append_tokens(world):
    return lambda: world.cache.append_tokens([world.x, world.y, world.s], [1, 2, 3])


@operation(situations=("shared",))
def append_ragged_tokens(world):
    return lambda: world.cache.append_tokens([world.x, world.y, world.u], [[1] * 40, [2], [3] * 70])


# -- a step ------------------------------------------------------------------------------------------------------------


@operation()
def prepare(world):
    def run():
        world.batches["new"] = world.cache.prepare([world.x, world.y], [2, 3])

    return run


@operation()
def prepare_into_a_batch(world):
    batch = world.batches["new"] = world.cache.make_batch(4, 32)
    return lambda: world.cache.prepare([world.x, world.y], [3, 1], out=batch)


@operation(situations=("shared", "forked", "cut", "doubled", "short"))
def prepare_many_blocks(world):
    batch = world.batches["new"] = world.cache.make_batch(4, 64)
    return lambda: world.cache.prepare([world.x, world.y], [30, 9], out=batch)


@operation(situations=("shared",))
def prepare_a_batch_again(world):
    batch = world.batches["flying"]
    world.cache.commit(batch)
    world.batches["flying"] = world.cache.make_batch(4, 32)
    batch = world.batches["flying"]
    world.future["z"] = [41, 42, 43, 44]
    fill(world, world.cache.prepare([world.x], [1], out=batch), [world.x], [1])
    world.cache.commit(batch)
    return lambda: world.cache.prepare([world.x, world.z], [1, 4], out=batch)


@operation(situations=("shared", "forked", "cut", "doubled", "short"))
def prepare_arrival(world):
    def run():
        world.batches["new"] = world.cache.prepare_arrival(world.x, 22)

    return run


@operation(situations=("shared", "short"))
def prepare_arrival_into_a_batch(world):
    batch = world.batches["new"] = world.cache.make_batch(4, 32)
    return lambda: world.cache.try_prepare_arrival(world.x, 13, out=batch)


def arrival(world, count):
    """Prepare and write an arrival of x."""
    batch = world.batches["step"] = world.cache.prepare_arrival(world.x, count)
    world.future["x"] = list(range(31, 31 + count))
    fill(world, batch, [world.x], [count])
    return batch


@operation(situations=("shared", "forked", "cut", "doubled", "short"))
def commit_arrival(world):
    batch = arrival(world, 22)
    return lambda: world.cache.commit(batch)


@operation(situations=("shared", "forked", "cut", "short"))
def commit_arrival_whose_ids_are_known(world):
    world.cache.append_tokens([world.x], [list(range(31, 51))])
    batch = world.batches["step"] = world.cache.prepare_arrival(world.x, 22)
    fill(world, batch, [world.x], [22])
    return lambda: world.cache.commit(batch)


@operation(situations=("shared", "cut", "short"))
def abandon_arrival(world):
    arrival(world, 22)
    return lambda: world.cache.abandon([world.x])


@operation(situations=("shared", "short"), reads=True)
def held_from(world):
    return lambda: world.cache.held_from(world.x, world.cache.num_groups - 1)


def step(world, counts):
    """Prepare and write a step of x and y."""
    sequences = [world.x, world.y]
    batch = world.batches["step"] = world.cache.prepare(sequences, counts)
    for name in "xy":
        world.future[name] = list(range(31, 43))
    fill(world, batch, sequences, counts)
    return batch


@operation()
def commit(world):
    batch = step(world, [2, 5])
    return lambda: world.cache.commit(batch)


@operation()
def commit_some_accepted(world):
    batch = step(world, [4, 5])
    return lambda: world.cache.commit(batch, accepted=[2, 3])


@operation(situations=("shared",))
def commit_nothing_accepted(world):
    batch = step(world, [4, 5])
    return lambda: world.cache.commit(batch, accepted=[0, 0])


@operation(situations=("shared", "short"))
def commit_after_a_removal(world):
    batch = step(world, [2, 5])
    world.cache.remove(world.x)
    return lambda: world.cache.commit(batch)


@operation()
def abandon(world):
    batch = step(world, [4, 9])
    return lambda: world.cache.abandon(batch)


@operation(situations=("shared",), reads=True, bytes=True)
def write(world):
    batch = world.batches["step"] = world.cache.prepare([world.x, world.y], [2, 2])
    return lambda: fill(world, batch, [world.x, world.y], [2, 2])


@operation(situations=("shared",), reads=True, bytes=True)
def attend(world):
    batch = step(world, [2, 5])
    query = np.ones((7, 4, 8), np.float32)
    return lambda: world.cache.attend(0, query, batch)


@operation(situations=("shared",))
def make_batch(world):
    return lambda: world.batches.update(new=world.cache.make_batch(4, 16))


# -- swapping ----------------------------------------------------------------------------------------------------------


@operation()
def swap_out(world):
    return lambda: world.cache.swap_out([world.x, world.y], world.spaces[0])


@operation(situations=("shared",))
def try_swap_out(world):
    return lambda: world.cache.try_swap_out(world.w, world.spaces[1])


@operation(situations=("shared", "short"))
def swap_in(world):
    return lambda: world.cache.swap_in([world.s, world.t, world.u])


@operation(situations=("shared", "short"))
def swap_in_one_of_two(world):
    return lambda: world.cache.swap_in([world.s])


@operation(situations=("shared", "cut"))
def swap_in_from_another_dtype(world):
    world.spaces.append(SwapSpace(world.cache, num_blocks=12, dtype="float16"))
    world.cache.swap_out([world.x, world.y], world.spaces[-1])
    return lambda: world.cache.try_swap_in([world.x, world.t, world.y])


@operation(situations=("shared",))
def make_space(world):
    return lambda: world.spaces.append(SwapSpace(world.cache, num_blocks=8))


# -- state -------------------------------------------------------------------------------------------------------------


@operation(situations=("shared", "doubled", "short"))
def clear_prefix_cache(world):
    return world.cache.clear_prefix_cache


@operation(situations=("shared", "doubled", "short"))
def evict_prefix(world):
    return lambda: world.cache.evict_prefix(OTHER, keep=1)


@operation(situations=("shared", "doubled", "short"))
def evict_namespace(world):
    return lambda: world.cache.evict_namespace(None)


@operation(situations=("shared",), reads=True)
def stats(world):
    return world.cache.stats


@operation(situations=("shared",), reads=True)
def block_map(world):
    return lambda: world.cache.block_map(0)


@operation(situations=("shared", "named"), reads=True)
def match_length(world):
    return lambda: world.cache.match_length(OTHER[:9], **NAMED)


@operation(situations=("shared", "short"), reads=True)
def shortage(world):
    return lambda: world.cache.shortage([world.x, world.y], [30, 40])


@operation(situations=("shared", "short"), reads=True)
def shortages(world):
    return lambda: world.cache.shortages([world.x, world.y], [30, 40])


@operation(situations=("shared", "short"), reads=True)
def shortage_with_swapped(world):
    return lambda: world.cache.shortage([world.x, world.s, world.u], [30, 2, 4])


@operation(situations=("shared", "short"), reads=True)
def refused_prepare(world):
    counts = [world.cache.max_tokens_per_sequence - 14] * 2

    def run():
        if world.cache.try_prepare([world.x, world.y], counts) is not None:
            raise AssertionError("prepared without blocks")

    return run


@operation(situations=("shared",), reads=True)
def num_available(world):
    return lambda: world.cache.num_available


@operation(situations=("shared", "doubled", "short"))
def revoke_prefix(world):
    return lambda: world.cache.revoke_prefix(OTHER, valid=1)


@operation(situations=("shared", "doubled", "short"))
def revoke_blocks(world):
    row = np.asarray(world.cache.block_table())[world.x.row]
    block = int(row[row > 0][0])  # the first ones of a window may be gone
    return lambda: world.cache.revoke_blocks([block])


@operation(situations=("shared", "doubled", "short"))
def pin_prefix(world):
    return lambda: world.pins.append(world.cache.pin_prefix(OTHER))
