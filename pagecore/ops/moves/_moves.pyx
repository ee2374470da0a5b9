"""Writes to a paged cache, and moves of its blocks and slots."""

include "blocks.pxi"
include "slot_moves.pxi"
include "move_slots.pxi"
include "write.pxi"
