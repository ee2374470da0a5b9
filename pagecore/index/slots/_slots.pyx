"""Slots of single tokens, for engines with tables of their own."""

include "request_table.pxi"
include "slot_methods.pxi"
include "slot_allocator.pxi"
include "window_slots.pxi"
