"""The identity of a sequence's content apart from its tokens, and checkpoints that arrive with a sequence."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t

from pagecore.cache.prefix._prefix cimport number_namespaces, publish_one
from pagecore.cache.sequences._sequences cimport Sequence, require
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport Mark
from pagecore.index.radix._radix cimport key_of
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport vector


def namespace_digest(namespace):
    """Return 16 bytes that identify a namespace in every process; None if only this process can compare it.

    Strings, bytes, numbers, None, booleans and tuples of them have a digest.
    """
    return digest_of_key(None if namespace is None else key_of(namespace))


def content_identity(CacheState state not None, sequence):
    """Return the digest of a sequence's namespace, and that of its spans: bytes, or None; empty for none.

    A cache without a prefix cache keeps neither: both are None.
    """
    cdef Sequence checked
    cdef size_t i
    cdef Mark* mark
    cdef uint8_t* content
    _guard = Held(state.lock)
    checked = require(state, sequence, False)
    if checked.hold is None:
        return None, None
    spans = digest_16()
    for i in range(checked.hold.marks.size()):
        mark = &checked.hold.marks[i]
        content = mark.digest.bytes.data()
        spans.update(b"%d %d %d %d " % (mark.block, mark.start, mark.end, mark.digest.kind))
        spans.update(content[:32])
    return digest_of_key(checked.hold.receipt.key), b"" if checked.hold.marks.empty() else spans.digest()


def num_publishable_tokens(CacheState state not None, sequence):
    """Return the tokens whose blocks a sequence may publish; None for all, and for a cache without a prefix cache.

    Later tokens were revoked, follow a sealed block that was cut, or were rounded by a swap space.
    """
    cdef Sequence checked
    _guard = Held(state.lock)
    checked = require(state, sequence, False)
    if checked.hold is None:
        return None
    if checked.hold.published == INT32_MAX and not checked.hold.is_private:
        return 0
    limit = <int64_t>checked.hold.publish_limit * state.block_size
    return None if limit >= checked.computed else limit


def limit_publishing(CacheState state not None, sequence, tokens):
    """Let a sequence publish blocks of its first `tokens` tokens only; None leaves it as it is."""
    cdef Sequence checked
    _guard = Held(state.lock)
    checked = require(state, sequence, False)
    if checked.hold is not None and tokens is not None:
        checked.hold.publish_limit = min(checked.hold.publish_limit, <int32_t>(tokens // state.block_size))


def adopt_checkpoint(CacheState state not None, sequence, int32_t length, fill):
    """Give an idle sequence the state after its first `length` tokens as its checkpoint; False without a free slot.

    Parameters
    ----------
    length : int
        A multiple of the grid of checkpoints, up to the computed tokens.
    fill : callable
        ``fill(slot)`` writes the state to a slot, which nothing else uses yet.
    """
    cdef Sequence checked
    cdef BlockPool slots
    cdef vector[int32_t] taken
    cdef int32_t running, resting
    cdef BlockPool owner
    _guard = Held(state.lock)
    state.begin()
    checked = require(state, sequence, True)
    if state.states is None or state.states.checkpoint_length_raw(checked.row) > 0:
        return False
    slots = state.states.checkpoints
    taken.resize(1)
    if not slots.try_allocate_raw(taken):
        return False
    try:
        fill(taken[0])
        checked = require(state, sequence, True)
        if state.prefix is not None:
            number_namespaces(state.prefix, [checked])
    except BaseException:
        slots.free_raw(taken.data(), 1)
        raise
    # From here on nothing fails. The row takes references of its own.
    running = state.states.slot_raw(checked.row)
    resting = state.states.resting_raw(checked.row)
    owner = state.states.slots
    owner.share_raw(&running, running != 0)
    slots.share_raw(&resting, resting != 0)
    state.states.remove_raw(Int32s(&checked.row, 1))
    state.states.restore_raw(checked.row, checked.computed, running, resting, length, taken[0])
    owner.free_raw(&running, running != 0)
    slots.free_raw(&resting, resting != 0)
    slots.free_raw(taken.data(), 1)
    if state.prefix is not None:
        publish_one(state.prefix, checked, 0)
    return True


cdef object digest_of_key(object key):
    if key is None:
        return b""
    if isinstance(key, str):
        return digest_16(b"s" + key.encode("utf-8", "surrogatepass")).digest()
    packed, *held = key
    if held:
        return None
    return digest_16(b"k" + packed).digest()


cdef object digest_16(bytes data=b""):
    from hashlib import blake2b  # it loads OpenSSL, which `import pagecore` does without

    return blake2b(data, digest_size=16)
