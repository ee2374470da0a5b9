"""The prefix cache: computed blocks that outlive their sequence and serve later sequences with the same prefix."""

include "watched.pxi"
include "cache.pxi"
include "inspect.pxi"
include "publish.pxi"
include "truncated.pxi"
include "evict.pxi"
include "revoke.pxi"
