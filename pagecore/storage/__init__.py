"""Specs and planes of layers, memory layouts, and the pools that hold the bytes."""

from pagecore.storage.alias import Alias
from pagecore.storage.attention_spec import AttentionSpec
from pagecore.storage.checkpoint_pool import CheckpointPool
from pagecore.storage.cross_spec import CrossSpec
from pagecore.storage.figures import MemoryFigures, memory_figures
from pagecore.storage.host_memory import HostMemory
from pagecore.storage.host_pool import HostPool
from pagecore.storage.latent_spec import LatentSpec
from pagecore.storage.layout import KVLayout
from pagecore.storage.memory import free_memory, parse_memory
from pagecore.storage.parallel import TensorParallel
from pagecore.storage.pool import KVPool
from pagecore.storage.regions import Region
from pagecore.storage.spec import Plane, Spec
from pagecore.storage.state_pool import StatePool, state_budget
from pagecore.storage.state_spec import StateSpec

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
    "Spec",
    "StatePool",
    "StateSpec",
    "TensorParallel",
    "free_memory",
    "memory_figures",
    "parse_memory",
    "state_budget",
]
