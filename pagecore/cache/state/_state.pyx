"""The native state of a cache: its lock, its sequences, and the tenants of its blocks."""

include "lock.pxi"
include "stored.pxi"
include "tenants.pxi"
include "state.pxi"
