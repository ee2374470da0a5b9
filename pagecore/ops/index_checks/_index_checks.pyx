"""Checks of index arrays against caches: on the host, and in debug mode on a device."""

include "block_checks.pxi"
include "debug.pxi"
