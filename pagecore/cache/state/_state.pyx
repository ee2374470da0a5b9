"""The native state of a cache: its lock, its sequences, and the tenants and seals of its blocks."""

include "lock.pxi"
include "stored.pxi"
include "tenants.pxi"
include "seals.pxi"
include "new_blocks.pxi"
include "restored.pxi"
include "state.pxi"
