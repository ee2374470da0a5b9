"""Arguments with which a prefix tree is made."""

from libc.stdint cimport int64_t

from pagecore.index._integers cimport as_int64
from pagecore.index.radix._radix_native cimport Options, Policy
from pagecore.native.std cimport vector

from pagecore.errors import UnsupportedDtype, UnsupportedOption, shown

# In the order of the native Policy.
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank")


cdef Options read_options(
    object block_size, object full, object windows, object chunks, object sinks, object states,
    object state_interval, object policy
):
    cdef Options options
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnsupportedOption(f"policy is {shown(policy)}; use one of {', '.join(POLICIES)}")
    if not isinstance(states, bool):
        raise UnsupportedDtype(f"states is {shown(states)}; use True or False")
    options.block_size = as_int64(block_size, "block_size")
    options.full_lanes = as_int64(full, "full")
    read_each(windows, "a window", False, options.windows)
    read_each(chunks, "a chunk", True, options.chunks)
    read_each(sinks, "the sinks", True, options.sinks)
    options.has_states = states
    if states and options.block_size > 0:
        options.state_interval = (-(-64 // options.block_size) * options.block_size if state_interval is None
                                  else as_int64(state_interval, "state_interval"))
    elif state_interval is not None:
        raise UnsupportedOption(
            f"state_interval is {shown(state_interval)} and the tree has no states; give states=True"
        )
    cdef int position = POLICIES.index(policy)
    options.policy = <Policy> position
    return options


cdef int read_each(object values, str name, bint takes_none, vector[int64_t]& out) except -1:
    """Append one value for each window, or the value of the only window; None, where it is taken, is 0."""
    try:
        values = tuple(values)
    except TypeError:
        values = (values,)
    for value in values:
        out.push_back(0 if takes_none and value is None else as_int64(value, name))
    return 0
