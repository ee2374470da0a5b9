"""Ids of blocks and slots: pool, block and state tables, allocator, request table and prefix tree."""

from pagecore.index.pools._block_pool import BlockPool
from pagecore.index.radix._radix import (
    POLICIES,
    ChangeLog,
    Evicted,
    Inserted,
    Match,
    RadixTree,
    Receipt,
    chain_hashes,
    check_policy,
)
from pagecore.index.radix.changes import Change
from pagecore.index.slots._slots import RequestTable, SlotAllocator, WindowSlotAllocator
from pagecore.index.states._states import StateBuffers, StateTable
from pagecore.index.tables._tables import BlockTables, StepBuffers

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
