"""Arguments with which a prefix tree is made."""

import re

from libc.stdint cimport int64_t
from libcpp.utility cimport move

from pagecore.index._integers cimport as_int64
from pagecore.index.radix._native cimport Options, Policy
from pagecore.native.std cimport vector

from pagecore.errors import UnsupportedDtype, UnsupportedOption, shown

# In the order of the native Policy.
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank")
# Share of the blocks that "slru" protects.
PROTECTED_SHARE = 0.1


def check_policy(policy, name="policy", known=POLICIES):
    """Return an eviction policy; raise UnsupportedOption unless it is one of `known`, or "slru:SHARE"."""
    if isinstance(policy, str) and (policy in known or ("slru" in known and policy.startswith("slru:"))):
        share_of(policy, name)
        return str(policy)
    names = [f"{each} or {each}:SHARE" if each == "slru" else each for each in known]
    raise UnsupportedOption(f"{name} is {shown(policy)}; use one of {', '.join(names)}")


cdef double share_of(object policy, object name) except -1:
    """The share of the blocks that a policy protects."""
    _, colon, given = policy.partition(":")
    if not colon:
        return PROTECTED_SHARE
    share = float(given) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", given) else -1.0
    if not 0 <= share <= 1:
        raise UnsupportedOption(f"{name} is {shown(policy)}; the share after 'slru:' is a number from 0 to 1")
    return share


cdef Options read_options(
    object block_size, object full, object windows, object chunks, object sinks, object states,
    object state_interval, object min_kept, object policy
):
    cdef Options options
    cdef str checked = check_policy(policy)
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
    options.min_kept = as_int64(min_kept, "min_kept")
    cdef int position = POLICIES.index(checked.partition(":")[0])
    options.policy = <Policy> position
    options.protected_share = share_of(checked, "policy")
    return move(options)


cdef int read_each(object values, str name, bint takes_none, vector[int64_t]& out) except -1:
    """Append one value for each window, or the value of the only window; None, where it is taken, is 0."""
    try:
        values = tuple(values)
    except TypeError:
        values = (values,)
    for value in values:
        out.push_back(0 if takes_none and value is None else as_int64(value, name))
    return 0
