"""State tables: the slots of recurrent states and of their checkpoints."""

include "state_buffers.pxi"
include "state_table_core.pxi"
include "state_table.pxi"
