"""Spilling: blocks of the device are evicted in the order of its policy, each after it was copied to the host.

Eviction takes a path from its end, a few blocks at a time, and the host's tree needs a path from its beginning. The end
of a path that is being evicted therefore waits outside of the tree, as a `SpilledTail`, and is published when its last
block has left the device, or when a prompt asks for it. Otherwise the host would keep a second copy of what the device
still has of the path.
"""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport PrefixCache, evict, evict_states, read_counts
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index.radix._native cimport Mark
from pagecore.index.radix._radix cimport array_of, key_of
from pagecore.native.std cimport vector


def save_victims(CacheState state not None, HostIndex host not None, missing, copy, done):
    """Evict blocks of the device in the order of its policy, each after it was copied; return their number.

    Blocks of a smaller priority than ``host.min_priority`` are not copied.

    Parameters
    ----------
    missing : list of int
        Blocks of each group to evict, and then states, in a cache with states.
    copy : callable
        ``copy(one)`` copies ``one.pairs`` before anything that the device is given later. If it returns True, it calls
        ``one.finish()`` later.
    done : callable
        ``done(backup)`` is called for each Backup that was published at once.
    """
    cdef PrefixCache prefix = state.prefix
    cdef vector[int64_t] left, freed
    cdef int64_t wanted = 0, evicted = 0
    cdef int32_t group, free_slots = 0
    read_counts(missing, left)
    _guard = Held(state.lock)
    host.sweep()
    if prefix.states is not None:
        free_slots = prefix.states.checkpoints.num_free_raw()
    for group in range(prefix.num_lanes):
        if prefix.components[group] == 0:
            wanted = max(wanted, left[group])
    freed.assign(<size_t>prefix.num_lanes, 0)
    evicted += evict_saved(state, host, 0, wanted, freed, copy, done)
    for group in range(prefix.num_lanes):
        if prefix.components[group] > 0:
            evicted += evict_saved(
                state, host, prefix.components[group], left[group] + freed[group], freed, copy, done
            )
    if prefix.states is not None:
        wanted = left[prefix.num_lanes] - (prefix.states.checkpoints.num_free_raw() - free_slots)
        evicted += evict_saved_states(state, host, wanted, copy, done)
    return evicted


cdef int64_t evict_saved(
    CacheState state, HostIndex host, int32_t component, int64_t wanted, vector[int64_t]& freed, copy, done
) except -1:
    """Evict up to `wanted` blocks of a component, one node after the other, each after it was copied."""
    cdef int64_t evicted = 0, step
    cdef int32_t node
    while evicted < wanted:
        node = state.prefix.tree.native.next_victim(component)
        if node < 0:
            break
        step = min(wanted - evicted, max(state.prefix.tree.native.num_ids_to_take(node, component), 1))
        if state.prefix.tree.native.priority_of(node, component) >= host.min_priority:
            if component == 0 and host.is_exclusive and not host.has_states:
                save_end(state, host, node, step, copy, done)
            else:
                save_path(state, host, node, copy, done)
        step = evict(state.prefix, component, step, freed)
        if step == 0:
            break
        evicted += step
    return evicted


cdef int64_t evict_saved_states(CacheState state, HostIndex host, int64_t wanted, copy, done) except -1:
    """Evict states until `wanted` slots are free, each after it was copied; return the number of states."""
    cdef PrefixCache prefix = state.prefix
    cdef int32_t component = <int32_t>len(prefix.tree.components) - 1
    cdef int64_t evicted = 0, freed = 0
    cdef int32_t node
    while wanted > 0:
        node = prefix.tree.native.next_victim(component)
        if node < 0:
            break
        if prefix.tree.native.priority_of(node, component) >= host.min_priority:
            save_path(state, host, node, copy, done)
        freed = evict_states(prefix, 1)
        if freed < 0:
            break
        evicted += 1
        wanted -= freed
    return evicted


cdef int save_end(CacheState state, HostIndex host, int32_t node, int64_t num_blocks, copy, done) except -1:
    """Copy the last blocks of a path, which are about to be evicted, and publish them when the path is complete."""
    cdef PrefixCache prefix = state.prefix
    cdef SpilledTail tail = host.tail
    cdef vector[int32_t] tokens
    cdef vector[Mark] marks
    cdef vector[vector[int32_t]] lanes
    cdef object key = prefix.tree.space_keys[prefix.tree.native.copy_path(node, tokens, marks, lanes)]
    cdef int64_t begin = <int64_t>tokens.size() // host.block_size - num_blocks
    if tail is not None and not tail.continues_at(key, tokens, marks):
        publish_tail(state, host, copy, done)
        tail = None
    if tail is None:
        tail = new_tail(state, host, key, tokens, marks)
    if tail.first > begin:
        publish_tail(state, host, copy, done)
        return save_path(state, host, node, copy, done)
    if not tail.extend(begin, lanes, copy):
        host.tail = None
        return 0
    host.tail = tail
    if begin == tail.first:
        publish_tail(state, host, copy, done)
    return 0


cdef int publish_tail(CacheState state, HostIndex host, copy, done) except -1:
    """Publish the tail that waits, along with what the host lacks before it; drop it if nothing connects the two."""
    cdef SpilledTail tail = host.tail
    cdef SpilledPart part
    cdef Backup one
    cdef bint is_running = False
    host.tail = None
    if tail is None or not tail.parts:
        return 0
    one = Backup.__new__(Backup)
    one.state = state
    one.host = host
    one.parts = tail.parts
    try:
        if not tail.fill(one):
            one.release()
            return 0
        for each in tail.parts:
            part = each
            is_running = is_running or part.is_running
        if (one.num_blocks == 0 and not is_running) or not copy(one):
            one.settle()
            done(one)
    except BaseException:
        one.release()
        raise
    return 0


cdef int save_path(CacheState state, HostIndex host, int32_t node, copy, done) except -1:
    """Copy what the host lacks of the path that ends with a node of the device's tree, and publish it."""
    cdef Backup one = Backup.__new__(Backup)
    one.state = state
    one.host = host
    try:
        if not plan_path(one, node):
            one.release()
        elif one.num_blocks == 0 and one.state_blocks == 0:
            one.settle()  # the host has it all: it is the most recent there now
        elif not copy(one):
            one.settle()
            done(one)
    except BaseException:
        one.release()
        raise
    return 0


cdef bint plan_path(Backup one, int32_t node) except -1:
    """List what the host lacks of a path, and take host blocks for it; return False if there is no room."""
    cdef PrefixCache prefix = one.state.prefix
    cdef vector[int64_t] counts
    cdef vector[int32_t] tokens
    cdef int32_t space, state
    one.key = PrefixKey.__new__(PrefixKey)
    space = prefix.tree.native.copy_path(node, tokens, one.key.marks, one.lanes)
    state = prefix.tree.native.state_of(node)
    one.key.ids = array_of(tokens)
    one.key.key = prefix.tree.space_keys[space]
    one.end = one.key.num_blocks = <int64_t>tokens.size() // one.host.block_size
    one.hint.rank = 0
    one.path = Path()
    one.path.pin(one.host.tree, one.key.key, one.key.query(one.end), one.end)
    one.first = one.path.num_blocks
    one.state_blocks = one.end if state >= 0 else 0
    if one.state_blocks > 0 and one.has_state():
        one.state_blocks = 0
    one.list_missing(counts)
    if not one.fit(counts):
        return False
    one.take(state, counts)
    return one.lease is not None


# -- the tail --------------------------------------------------------------------------------------------------------


def publish_waiting(CacheState state not None, HostIndex host not None, copy, done):
    """Publish the end of a path whose beginning is still on the device; the host then has the path twice."""
    _guard = Held(state.lock)
    if host.tail is not None:
        host.sweep()
        publish_tail(state, host, copy, done)


def publish_for(CacheState state not None, HostIndex host not None, const int32_t[::1] ids, options, copy, done):
    """Do what `publish_waiting` does, if a prompt continues into the end that waits."""
    cdef PrefixKey key
    _guard = Held(state.lock)
    if host.tail is None:
        return
    key = prefix_key(host.block_size, ids, options)
    if key.num_blocks > 0 and (<SpilledTail>host.tail).is_asked_for(key.key, key.ids):
        host.sweep()
        publish_tail(state, host, copy, done)


def evict_waiting(CacheState state not None, HostIndex host not None, const int32_t[::1] ids, options, int64_t keep):
    """Drop what waits of a prefix past `keep` tokens, unless the path that waits goes on past the prefix."""
    cdef PrefixKey key
    cdef SpilledTail tail
    _guard = Held(state.lock)
    tail = host.tail
    if tail is None:
        return
    key = prefix_key(host.block_size, ids, options)
    if key.num_blocks > 0 and tail.is_within(key):
        tail.cut((keep + host.block_size - 1) // host.block_size)
    if not tail.parts:
        host.tail = None


def drop_waiting_of(CacheState state not None, HostIndex host not None, namespace):
    """Drop the end that waits if its path belongs to a namespace."""
    cdef SpilledTail tail
    _guard = Held(state.lock)
    tail = host.tail
    if tail is not None and tail.key.key == (None if namespace is None else key_of(namespace)):
        drop_waiting(state, host)


def drop_waiting(CacheState state not None, HostIndex host not None):
    """Drop the end that waits."""
    cdef SpilledTail tail
    _guard = Held(state.lock)
    tail = host.tail
    host.tail = None
    if tail is not None:
        while tail.parts:
            tail.drop_last()
