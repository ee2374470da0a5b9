"""Set cross: give a sequence its encoder output after it was added."""

from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequences cimport CrossContent, Sequence, require
from pagecore.cache.state._state cimport CacheState, Held

from pagecore.cache.sequences._sequences import content_key
from pagecore.errors import ShapeError


def set_cross(CacheState state not None, sequence, int32_t num_tokens, name):
    """Give a sequence its encoder output; see `PagedKVCache.set_cross_tokens`.

    Parameters
    ----------
    name : bytes, int, tuple or None
        The output's name in the namespace of the sequence, as `name_output` returns it.
    """
    cdef Sequence checked
    cdef CrossContent content
    _guard = Held(state.lock)
    state.begin()
    checked = require(state, sequence, True)
    if checked.cross is not None:
        raise ShapeError(
            f"sequence {checked.id!r} has {checked.cross.num_tokens} encoder tokens, which are set once; add a new "
            "sequence for another encoder output"
        )
    content = state.cross.find(None if name is None else content_key(checked.namespace, name), num_tokens)
    # From here on nothing fails.
    checked.cross = content
    state.cross.hold(content)
