"""Block tables: the blocks of sequences in groups of layers, and the arrays of a step."""

include "step_buffers.pxi"
include "block_tables_core.pxi"
include "table_steps.pxi"
include "block_tables.pxi"
