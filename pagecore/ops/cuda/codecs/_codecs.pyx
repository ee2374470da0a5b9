"""Launches of conversions of stored rows and states, and of transforms of rows."""

include "convert.pxi"
include "affine.pxi"
include "states.pxi"
include "hadamard.pxi"
