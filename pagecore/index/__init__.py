"""Which block? The pool of block ids and the block tables of the sequences (plain integers; no bytes are held here)."""

from pagecore.index._block_pool import BlockPool
from pagecore.index._block_tables import BlockTables
from pagecore.index._step_buffers import StepBuffers

__all__ = ["BlockPool", "BlockTables", "StepBuffers"]
