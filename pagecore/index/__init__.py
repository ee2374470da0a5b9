"""Ids of blocks and slots: pool, block and state tables, allocator, request table and prefix tree."""

from pagecore.index.pools._block_pool import BlockPool
from pagecore.index.radix._radix_core import Receipt
from pagecore.index.radix._radix_journal import ChangeLog, chain_hashes
from pagecore.index.radix._radix_options import POLICIES, check_policy
from pagecore.index.radix._radix_tree import RadixTree
from pagecore.index.radix._radix_values import Evicted, Inserted, Match
from pagecore.index.radix.changes import Change
from pagecore.index.slots._request_table import RequestTable
from pagecore.index.slots._slot_allocator import SlotAllocator
from pagecore.index.slots._window_slots import WindowSlotAllocator
from pagecore.index.states._state_buffers import StateBuffers
from pagecore.index.states._state_table import StateTable
from pagecore.index.tables._block_tables import BlockTables
from pagecore.index.tables._step_buffers import StepBuffers

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
    "check_policy",
]
