"""Specs and planes of layers, memory layouts, and the pools that hold the bytes."""

from pagecore.storage.memory.budgets import free_memory, parse_memory
from pagecore.storage.memory.figures import MemoryFigures, memory_figures
from pagecore.storage.memory.host_memory import HostMemory
from pagecore.storage.pools.checkpoint_pool import CheckpointPool
from pagecore.storage.pools.host_pool import HostPool
from pagecore.storage.pools.layout import KVLayout
from pagecore.storage.pools.pool import KVPool
from pagecore.storage.pools.regions import Region
from pagecore.storage.pools.state_pool import StatePool, state_budget
from pagecore.storage.specs.alias import Alias
from pagecore.storage.specs.attention_spec import AttentionSpec
from pagecore.storage.specs.cross_spec import CrossSpec
from pagecore.storage.specs.latent_spec import LatentSpec
from pagecore.storage.specs.parallel import TensorParallel
from pagecore.storage.specs.row_spec import RowSpec
from pagecore.storage.specs.spec import Plane, Spec
from pagecore.storage.specs.state_spec import StateSpec

__all__ = [
    "Alias",
    "AttentionSpec",
    "CheckpointPool",
    "CrossSpec",
    "HostMemory",
    "HostPool",
    "KVLayout",
    "KVPool",
    "LatentSpec",
    "MemoryFigures",
    "Plane",
    "Region",
    "RowSpec",
    "Spec",
    "StatePool",
    "StateSpec",
    "TensorParallel",
    "free_memory",
    "memory_figures",
    "parse_memory",
    "state_budget",
]
