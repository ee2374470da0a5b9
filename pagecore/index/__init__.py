"""Ids of blocks and slots: pool, block and state tables, allocator, request table and prefix tree."""

from pagecore.index._block_pool import BlockPool
from pagecore.index._block_tables import BlockTables
from pagecore.index._radix_core import Receipt
from pagecore.index._radix_journal import ChangeLog, chain_hashes
from pagecore.index._radix_options import POLICIES
from pagecore.index._radix_tree import RadixTree
from pagecore.index._radix_values import Evicted, Inserted, Match
from pagecore.index._request_table import RequestTable
from pagecore.index._slot_allocator import SlotAllocator
from pagecore.index._state_buffers import StateBuffers
from pagecore.index._state_table import StateTable
from pagecore.index._step_buffers import StepBuffers
from pagecore.index._window_slots import WindowSlotAllocator
from pagecore.index.changes import Change

__all__ = [
    "POLICIES",
    "BlockPool",
    "BlockTables",
    "Change",
    "ChangeLog",
    "Evicted",
    "Inserted",
    "Match",
    "RadixTree",
    "Receipt",
    "RequestTable",
    "SlotAllocator",
    "StateBuffers",
    "StateTable",
    "StepBuffers",
    "WindowSlotAllocator",
    "chain_hashes",
]
