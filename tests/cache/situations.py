"""Caches in many situations, for the fault tests of each operation."""

from pagecore import PagedKVCache, SwapSpace
from tests.cache.caches import SPEC, WINDOWED
from tests.cache.state import World, advance, fill

PROMPT = list(range(100, 140))
OTHER = list(range(200, 240))
SHARED = [*PROMPT[:8], *range(50, 58)]
NAMED = {"namespace": ("adapter", 1), "spans": [(4, 8, b"image")]}

# Layers, blocks of each group, and options of the cache.
CONFIGURATIONS = {
    "one group": (SPEC, 60, {}),
    "with a window": ([SPEC, WINDOWED], [60, 60], {}),
    "without prefix cache": ([SPEC, WINDOWED], [60, 60], {"prefix_cache": False}),
    "priority": (SPEC, 60, {"eviction_policy": "priority"}),
    "without bytes": ([SPEC, WINDOWED, SPEC], [60, 60], {"device": "none"}),
    "window alone": (WINDOWED, 60, {}),
}
SITUATIONS = ("shared", "forked", "cut", "doubled", "named", "short")


def make_world(configuration, situation):
    """A cache with sequences in many states.

    ``x`` and ``y`` are idle, with 14 computed tokens of 16 known; the situation decides which blocks they share. ``w``
    has 5 computed tokens, of which 3 ids are known. ``s`` and ``t`` share blocks in the first swap space, and ``u`` is
    in the second. ``z`` is in flight with the batch ``flying``. Another prompt is only in the prefix cache.
    """
    layers, blocks, options = CONFIGURATIONS[configuration]
    cache = PagedKVCache(layers, block_size=4, num_blocks=blocks, max_sequences=10, clock=lambda: 0.0, **options)
    world = World(cache, [SwapSpace(cache, num_blocks=12), SwapSpace(cache, num_blocks=12)])
    world.probes = [(PROMPT[:21], {}), ([*SHARED, 1], {}), (OTHER[:17], {}), ([*PROMPT[:14], 9, 9, 9], NAMED)]
    given = {"priority": 60.0, "time_to_live": 5.0} if "eviction_policy" in options else {}
    add(world, "kept", PROMPT[:20], **given)
    advance(world, [world.kept], [20 - world.kept.num_computed_tokens])
    cache.remove(world.sequences.pop("kept"))
    add_swapped(world)
    add_late(world)
    add_pair(world, situation)
    add(world, "z", [*PROMPT[:8], 3, 4, 5])
    counts = [11 - world.z.num_computed_tokens]
    world.batches["flying"] = cache.prepare([world.z], counts)
    fill(world, world.batches["flying"], [world.z], counts)
    if situation == "short":
        add_filler(world)
    return world


def add(world, name, tokens, **options):
    world.kinds[name] = options.get("namespace"), options.get("spans")
    world.sequences[name] = world.cache.add_sequence(tokens, name, **options)


def compute(world, names, length):
    sequences = [world.sequences[name] for name in names]
    advance(world, sequences, [length - sequence.num_computed_tokens for sequence in sequences])


def add_swapped(world):
    cache = world.cache
    add(world, "s", [*PROMPT[:9], 1, 2])
    compute(world, "s", 11)
    world.sequences["t"] = cache.fork(world.s, "t")
    add(world, "u", [7] * 6)
    compute(world, "u", 6)
    cache.swap_out([world.s, world.t], world.spaces[0])
    cache.swap_out([world.u], world.spaces[1])


def add_late(world):
    add(world, "w", [21, 22, 23])
    world.future["w"] = [24, 25, 26, 27]
    compute(world, "w", 5)


def add_pair(world, situation):
    cache = world.cache
    if situation == "doubled":
        for name in "xy":
            add(world, name, OTHER[:16])
        compute(world, "xy", 14)
        return
    if situation == "named":
        add(world, "x", PROMPT[:16], **NAMED)
        compute(world, "x", 14)
        add(world, "y", PROMPT[:16], **NAMED)
        compute(world, "y", 14)
        return
    if situation == "cut":
        add(world, "x", OTHER[:16])
        compute(world, "x", 16)
        cache.truncate(world.x, 14)
        cache.append_tokens([world.x], [[11, 12]])
    else:
        add(world, "x", PROMPT[:16])
        compute(world, "x", 14)
    if situation == "forked":
        world.sequences["y"] = cache.fork(world.x, "y")
    else:
        add(world, "y", SHARED)
        compute(world, "y", 14)


def add_filler(world):
    """Fill all free blocks with cached prefixes, so that the next blocks come from eviction."""
    cache = world.cache
    maps = [cache.block_map(group) for group in range(cache.num_groups)]
    free = min(int((one.holders[1:] + one.cached[1:] == 0).sum()) for one in maps)
    size = min(free * cache.block_size, cache.max_tokens_per_sequence)
    add(world, "filler", range(1000, 1000 + size))
    compute(world, ["filler"], size)
    cache.remove(world.sequences.pop("filler"))
