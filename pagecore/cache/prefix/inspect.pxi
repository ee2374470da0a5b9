"""Reports and checks of a prefix cache; its callers hold the lock of the cache."""

from libc.stdint cimport INT32_MAX, int32_t

from pagecore.cache.sequences._sequences cimport Sequence

import numpy as np

from pagecore.errors import PagecoreError


def prefix_figures(PrefixCache prefix not None):
    """Return the fields of `CacheStats` that concern the prefix cache."""
    names = [prefix.tree.components[component] for component in prefix.components]
    found = {
        "num_cached_blocks": sum(prefix.tree.evictable(name) + prefix.tree.protected(name) for name in names),
        "num_evicted_blocks": prefix.num_evicted_blocks,
        "prefix_hits": prefix.num_hits,
        "prefix_misses": prefix.num_misses,
        "prefix_query_tokens": prefix.num_query_tokens,
        "prefix_hit_tokens": prefix.num_hit_tokens,
        "prefix_shared_tokens": prefix.num_shared_tokens,
    }
    if prefix.states is not None:
        found["num_cached_states"] = prefix.tree.evictable("state") + prefix.tree.protected("state")
        found["num_evicted_states"] = prefix.num_evicted_states
    return found


def cached_blocks(PrefixCache prefix not None, int32_t group):
    """Return every block of a group that the tree holds: int32, ascending, a new array."""
    if group >= prefix.num_lanes:
        return np.zeros(0, np.int32)
    return prefix.tree.held_blocks(prefix.lane_of[group])


def cached_length(PrefixCache prefix not None, ids, options, most):
    """Return the number of tokens, up to `most`, that a sequence with these ids would reuse."""
    found = prefix.tree.match(ids, namespace=options.namespace, spans=options.spans, max_tokens=most)
    hit = found.num_shared_tokens if prefix.states is None else found.num_full_tokens
    if prefix.gives_up_last and hit:
        most = hit - prefix.block_size
        found = prefix.tree.match(ids, namespace=options.namespace, spans=options.spans, max_tokens=most)
    return found.num_tokens


def cached_states(PrefixCache prefix not None):
    """Return every slot of states that the tree or a transfer holds: int32, a new array; a slot may repeat."""
    held = [prefix.tree.held_states()]
    for transfer in prefix.transfers:
        held.extend(transfer.blocks[prefix.num_lanes:])
    return np.concatenate(held)


def check_prefixes(PrefixCache prefix not None, sequences):
    """Recount every block from the rows and the tree; `sequences` lists those of the cache."""
    cdef Sequence sequence
    prefix.tree.check_invariants()
    for lane, group in enumerate(prefix.groups):
        pool = prefix.pools[lane]
        holders = np.bincount(prefix.tables.table(group).ravel(), minlength=pool.num_blocks)
        holders[0] = 0
        holders[prefix.tree.held_blocks(lane)] += 1
        for transfer in prefix.transfers:
            holders += np.bincount(transfer.blocks[group], minlength=pool.num_blocks)
        holders[0] = 0
        if not np.array_equal(holders, pool.ref_counts()):
            raise PagecoreError(
                f"group {group}: reference counts do not match the holders (block tables + prefix tree + transfers)"
            )
    for group in range(prefix.num_lanes, prefix.tables.num_groups):
        pool = prefix.tables.pools[group]
        holders = np.bincount(prefix.tables.table(group).ravel(), minlength=pool.num_blocks)
        holders[0] = 0
        if not np.array_equal(holders, pool.ref_counts()):
            raise PagecoreError(f"group {group}: reference counts do not match the block tables")
    check_covered(prefix, sequences)
    num_truncated = num_duplicated = num_ahead = num_tentative = 0
    for sequence in sequences:
        published = 0 if sequence.hold.published == INT32_MAX else sequence.hold.published
        held = sequence.hold.receipt.depth()
        if (
            held < published
            or (held > published or sequence.hold.truncated_ahead) != sequence.hold.truncated_inside_block
            or (sequence.hold.has_ahead() and held >= sequence.hold.ahead.depth())
            or (sequence.row < 0 and held)
        ):
            raise PagecoreError(f"{sequence!r}: receipt covers {held} blocks but {published} were published")
        if held and sequence.hold.namespace_number != space_of(prefix, sequence.hold.receipt.key):
            raise PagecoreError(
                f"{sequence!r} publishes in namespace {sequence.hold.namespace_number} of the tree, and its namespace "
                f"is {space_of(prefix, sequence.hold.receipt.key)}"
            )
        num_truncated += sequence.hold.truncated_inside_block
        num_duplicated += sequence.hold.has_duplicates
        num_tentative += sequence.hold.is_tentative
        num_ahead += sequence.hold.has_ahead()
    if (num_truncated, num_duplicated) != (prefix.num_truncated, prefix.num_duplicated):
        raise PagecoreError(
            f"{num_truncated} sequences truncated inside a block and {num_duplicated} with duplicates were found; "
            f"the prefix cache counts {prefix.num_truncated} and {prefix.num_duplicated}"
        )
    if num_tentative != prefix.num_tentative:
        raise PagecoreError(
            f"{num_tentative} sequences are not counted yet; the prefix cache has {prefix.num_tentative} of them"
        )
    if prefix.tree.num_receipts != len(sequences) + num_ahead + len(prefix.transfers):
        raise PagecoreError(
            f"{prefix.tree.num_receipts} receipts are held for {len(sequences)} sequences, {num_ahead} of which "
            f"share blocks past their states, and for {len(prefix.transfers)} transfers and pins"
        )


cdef int check_covered(PrefixCache prefix, sequences) except -1:
    """Raise PagecoreError if a row has a block of the tree that no receipt of its sequence covers.

    Such a block is counted as evictable, and evicting it frees nothing.
    """
    cdef Sequence sequence
    cdef int32_t lane
    for lane in range(prefix.num_lanes):
        table = prefix.tables.table(prefix.groups[lane])
        is_held = np.zeros(prefix.pools[lane].num_blocks, bool)
        is_held[prefix.tree.held_blocks(lane)] = True
        is_held[0] = False
        for sequence in sequences:
            if sequence.row < 0:
                continue
            covered = sequence.hold.receipt.depth()
            if sequence.hold.has_component_ahead(prefix.component_of(lane)):
                covered = sequence.hold.ahead.depth()
            found = np.flatnonzero(is_held[table[sequence.row, covered:]])
            if found.size:
                raise PagecoreError(
                    f"{sequence!r}: block {covered + found[0]} of group {prefix.groups[lane]} is in the prefix cache, "
                    f"and the sequence's receipts cover {covered} blocks"
                )
    return 0
