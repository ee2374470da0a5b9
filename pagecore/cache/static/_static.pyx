"""Writes of a static cache: the next tokens of a batch, into one contiguous array for each plane."""

include "rows.pxi"
include "room.pxi"
