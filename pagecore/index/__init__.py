"""Which block? The pool of block ids, and what gives blocks to sequences (plain integers; no bytes are held here)."""

from pagecore.index._block_pool import BlockPool
from pagecore.index._block_tables import BlockTables
from pagecore.index._radix_tree import POLICIES, RadixTree, Receipt
from pagecore.index._radix_values import Evicted, Inserted, Match
from pagecore.index._request_table import RequestTable
from pagecore.index._slot_allocator import SlotAllocator
from pagecore.index._step_buffers import StepBuffers

__all__ = [
    "POLICIES",
    "BlockPool",
    "BlockTables",
    "Evicted",
    "Inserted",
    "Match",
    "RadixTree",
    "Receipt",
    "RequestTable",
    "SlotAllocator",
    "StepBuffers",
]
