"""Launches of conversions of stored rows and states."""

include "convert.pxi"
include "affine.pxi"
include "states.pxi"
