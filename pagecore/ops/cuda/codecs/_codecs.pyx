"""Launches of conversions of stored rows and states."""

include "convert.pxi"
include "states.pxi"
