"""Everything that a user can observe of a cache, as comparable values, through the public interface only."""

import gc
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pagecore import Batch, InvalidSequence, PagedKVCache, Sequence, SwapSpace
from pagecore.cache import PrefixPin

# Stored values are integers below this, which every stored float dtype represents exactly.
RANGE = 1 << 10


@dataclass
class World:
    """A cache and every object of it that a user holds.

    Attributes
    ----------
    kinds : dict
        Namespace and spans by sequence id; sequences without either are left out.
    future : dict
        Ids of tokens that the cache does not know yet, by sequence id.
    compacted : dict
        Text before compact, and the kept positions, by sequence id.
    probes : list of (list of int, dict)
        Prompts and options for `match_length`.
    pins : list of PrefixPin
    """

    cache: PagedKVCache
    spaces: list[SwapSpace] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    kinds: dict[object, tuple[object, object]] = field(default_factory=dict)
    future: dict[object, list[int]] = field(default_factory=dict)
    compacted: dict[object, tuple[list[int], list[int]]] = field(default_factory=dict)
    probes: list[tuple[list[int], dict]] = field(default_factory=list)
    pins: list[PrefixPin] = field(default_factory=list)

    def __getattr__(self, name):
        """Return a sequence by its name."""
        try:
            return self.__dict__["sequences"][name]
        except KeyError:
            raise AttributeError(name) from None

    def everyone(self):
        """Return the sequences of the cache in order, including those that an interrupted call did not return."""
        ids = self.cache.block_map().sequences
        known = {sequence.id: sequence for sequence in self.sequences.values() if not is_removed(sequence)}
        if set(ids) - set(known):
            known |= {found.id: found for found in reachable(self.cache, Sequence) if not is_removed(found)}
        return [known[name] for name in ids]


def is_removed(sequence):
    return sequence.row < 0 and not sequence.is_swapped


def reachable(root, kind):
    """Return the objects of a class that are reachable from `root` through pagecore objects and containers."""
    seen, waiting, found = {id(root)}, [root], []
    while waiting:
        for one in gc.get_referents(waiting.pop()):
            if id(one) in seen or isinstance(one, type):
                continue
            seen.add(id(one))
            if isinstance(one, kind):
                found.append(one)
            if isinstance(one, dict | list | tuple | set) or type(one).__module__.startswith("pagecore"):
                waiting.append(one)
    return found


# -- content -----------------------------------------------------------------------------------------------------------


def hashes(ids, namespace=None, spans=None):
    """Return a hash for each token of everything that its key and value depend on."""
    starts = {start: digest for start, _, digest in spans or ()}
    now, made = zlib.crc32(repr(namespace).encode()), []
    for position, token in enumerate(ids):
        now = zlib.crc32(repr((token, starts.get(position))).encode(), now)
        made.append(now)
    return np.array(made, np.int64)


def content(codes, layer, part, heads, dim):
    """Return key or value ``[len(codes), heads, dim]`` of tokens with these hashes in one layer."""
    places = np.arange(heads * dim).reshape(heads, dim)
    return ((codes[:, None, None] * (2 * layer + part + 3) + places) % RANGE).astype(np.float32)


def codes_of(world, sequence, length):
    namespace, spans = world.kinds.get(sequence.id, (None, None))
    if sequence.num_dropped_tokens > 0:
        text, keep = world.compacted[sequence.id]
        return hashes(text, namespace, spans)[keep][:length]
    ids = [*sequence.tokens.tolist(), *world.future.get(sequence.id, ())]
    return hashes(ids[:length], namespace, spans)


def fill(world, batch, sequences, counts):
    """Write the keys and values of a step's tokens in every layer."""
    cache = world.cache
    if cache.device == "none" or not sum(counts):
        return
    ends = [(s, s.num_computed_tokens, s.num_computed_tokens + n) for s, n in zip(sequences, counts, strict=True)]
    codes = np.concatenate([codes_of(world, sequence, end)[start:] for sequence, start, end in ends])
    for layer in range(cache.num_layers):
        key, value = (
            content(codes, layer, part, *side.shape[2:])
            for part, side in enumerate((cache.key(layer), cache.value(layer)))
        )
        cache.write(layer, key, value, batch)


def advance(world, sequences, counts):
    batch = world.cache.prepare(sequences, counts)
    fill(world, batch, sequences, counts)
    world.cache.commit(batch)


def check_content(world, sequence):
    """Assert that each computed token in a block of a sequence has the key and value of its own prefix."""
    cache = world.cache
    if cache.device == "none" or sequence.row < 0:
        return
    computed = sequence.num_computed_tokens
    codes = codes_of(world, sequence, computed)
    for layer in range(cache.num_layers):
        slots, held = slots_of(cache, sequence, cache.group_of(layer))
        for part, side in enumerate((cache.key(layer), cache.value(layer))):
            stored = side.numpy().reshape(-1, *side.shape[2:])[slots]
            assert np.array_equal(stored, content(codes[held], layer, part, *side.shape[2:])), (
                f"{sequence!r} has bytes in layer {layer} that are not its own"
            )


def slots_of(cache, sequence, group):
    """Return the slots of the computed tokens that a block of the group holds, and their positions."""
    positions = np.arange(sequence.num_computed_tokens)
    blocks = cache.block_table(group).numpy()[sequence.row][positions // cache.block_size]
    held = positions[blocks != 0]
    return blocks[held].astype(np.int64) * cache.block_size + held % cache.block_size, held


# -- what there is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A snapshot of a world.

    Attributes
    ----------
    exact : tuple
        Everything, with the ids of blocks and rows: equal if nothing was changed.
    canonical : tuple
        Everything without rows, with blocks renamed in the order in which sequences list them: equal if two calls did
        the same with different blocks.
    own : tuple
        `canonical` without the prefix cache, which may contain less if memory was short.
    batches : tuple
    hits : tuple of int
        Cached tokens of each probe.
    """

    exact: tuple
    canonical: tuple
    own: tuple
    batches: tuple
    hits: tuple


def snapshot(world):
    """Return the state of a world."""
    cache, everyone = world.cache, world.everyone()
    maps = [cache.block_map(group) for group in range(cache.num_groups)]
    tables = [cache.block_table(group).numpy() for group in range(cache.num_groups)]
    lists = [tuple(tuple(table[one.row].tolist()) if one.row >= 0 else () for table in tables) for one in everyone]
    names = [renaming(per[group] for per in lists) for group in range(cache.num_groups)]
    lines = [line(world, sequence) for sequence in everyone]
    stats = cache.stats()
    counts = tuple(
        (space.num_sequences, space.num_used_blocks, space.num_available, space.num_blocks) for space in world.spaces
    )
    hits = tuple(cache.match_length(tokens, **options) for tokens, options in world.probes)
    bytes_held = tuple(stored_bytes(cache, sequence) for sequence in everyone)
    renamed = tuple(
        tuple(tuple(names[group][block] for block in blocks) for group, blocks in enumerate(per)) for per in lists
    )
    gone = tuple(sorted(name for name, sequence in world.sequences.items() if is_removed(sequence)))
    common = (cache.num_sequences, cache.num_available, gone, counts, bytes_held)
    used = (stats.num_sequences, stats.num_tokens, stats.num_used_blocks, stats.num_copied_blocks, stats.prefix_hits)
    used += (stats.prefix_misses, stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.num_swapped_tokens)
    flights = tuple(in_flight(batch, everyone, names, cache) for batch in world.batches.values())
    rows = tuple(sequence.row for sequence in everyone)
    raw = tuple(in_flight(batch, None, None, cache) for batch in world.batches.values())
    every = tuple(tuple(map(bytes, (m.owner, m.holders, m.cached, m.num_tokens))) for m in maps)
    return State(
        exact=(common, stats, hits, tuple(lines), lists, rows, every, raw),
        canonical=(common, stats, hits, tuple(lines), renamed, tuple(map(blocks_by_name, maps, names))),
        own=(common, used, tuple(lines), renamed),
        batches=flights,
        hits=hits,
    )


def line(world, sequence):
    """Return the state of one sequence without blocks and bytes."""
    place = None if sequence.swap_space is None else world.spaces.index(sequence.swap_space)
    lengths = (sequence.num_computed_tokens, sequence.num_cached_tokens, sequence.num_dropped_tokens, sequence.capacity)
    return sequence.id, bytes(sequence.tokens), *lengths, place, sequence.row >= 0, is_idle(world.cache, sequence)


def is_idle(cache, sequence):
    """Return True if a sequence can take part in the next step; one in flight cannot."""
    try:
        cache.shortage([sequence], 0)
    except InvalidSequence:
        return False
    return True


def stored_bytes(cache, sequence):
    if cache.device == "none" or sequence.row < 0:
        return None
    sides = []
    for layer in range(cache.num_layers):
        slots, held = slots_of(cache, sequence, cache.group_of(layer))
        sides.append(held.tobytes())
        stored = [side.numpy().reshape(-1, *side.shape[2:])[slots] for side in (cache.key(layer), cache.value(layer))]
        sides += [side.tobytes() for side in stored]
    return zlib.crc32(b"".join(sides))


def renaming(lists):
    """Return new ids of blocks in the order of their first mention; the null block keeps its id."""
    names = {0: 0}
    for blocks in lists:
        for block in blocks:
            names.setdefault(block, len(names))
    return names


def blocks_by_name(each, names):
    """Return a block map: the blocks of sequences in the order of their new ids, and the others counted."""
    parts = list(zip(*(a.tolist() for a in (each.owner, each.holders, each.cached, each.num_tokens)), strict=True))
    others = Counter(part for block, part in enumerate(parts) if block not in names)
    return tuple(parts[block] for block in names), tuple(sorted(others.items()))


def in_flight(batch, everyone, names, cache):
    """Return rows, lengths and slots of a batch in flight, with renamed blocks if `names` are given; else None."""
    if not batch.in_flight:
        return None
    host = batch.host
    count, total = batch.num_sequences, batch.num_tokens
    rows = host.rows.numpy()[:count].tolist()
    sizes = tuple(host.query_lens.numpy()[:count].tolist()), tuple(host.seq_lens.numpy()[:count].tolist())
    slots = [mapping.numpy()[:total].tolist() for mapping in host.slot_mappings]
    if names is None:
        return tuple(rows), sizes, tuple(map(tuple, slots))
    by_row = {sequence.row: sequence.id for sequence in everyone if sequence.row >= 0}
    size = cache.block_size
    moved = tuple(
        tuple(-1 if s < 0 else (names[group].get(s // size, "free"), s % size) for s in mapping)
        for group, mapping in enumerate(slots)
    )
    return tuple(by_row.get(row) for row in rows), sizes, moved


# -- the end -----------------------------------------------------------------------------------------------------------


def audit(world):
    """Assert that all bytes are those of their tokens, also in reused prefixes, and that everything can be released."""
    cache = world.cache
    everyone = world.everyone()
    for sequence in everyone:
        check_content(world, sequence)
    if cache.num_sequences < cache.max_sequences:
        for tokens, options in world.probes:
            guest = cache.add_sequence(tokens, "guest", **options)
            world.kinds["guest"] = options.get("namespace"), options.get("spans")
            check_content(world, guest)
            cache.remove(guest)
    for sequence in everyone:
        cache.remove(sequence)
    for batch in world.batches.values():
        if batch.in_flight:
            cache.abandon(batch)
    for pin in world.pins:
        pin.release()
    cache.clear_prefix_cache()
    check_invariants(world)
    stats = cache.stats()
    left = (cache.num_sequences, stats.num_used_blocks, stats.num_cached_blocks, stats.num_swapped_blocks)
    assert left == (0, 0, 0, 0), f"sequences, used, cached and swapped blocks at the end: {left}"
    assert cache.num_available == min(cache.num_blocks) - 1
    assert all(space.num_used_blocks == space.num_sequences == 0 for space in world.spaces)


def check_invariants(world):
    world.cache.check_invariants()
    for space in world.spaces:
        space.check_invariants()
