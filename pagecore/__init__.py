"""A paged key-value (KV) cache for transformers, as a framework-agnostic library.

Each token is stored in a slot of a block. Keys and values are written to slots, and attention reads them through block
tables. `PagedKVCache` manages all of this. Its parts are public too: `BlockPool` and `BlockTables` allocate blocks, and
`write_kv` and `paged_attention` work on any arrays that support DLPack. Engines with their own request tables use
`SlotAllocator`, `RequestTable` and, for prefix reuse, `RadixTree`. `StaticKVCache` is a cache without blocks.
"""

from pagecore.arrays import DType, Tensor, as_dtype, as_tensor, empty, zeros
from pagecore.cache import (
    Alias,
    Batch,
    BatchGroup,
    BlockMap,
    CacheStats,
    KVCache,
    PagedCacheConfig,
    PagedKVCache,
    Sequence,
    StaticCacheConfig,
    StaticKVCache,
    SwapSpace,
    effective_length,
    make_cache,
)
from pagecore.errors import (
    CompileError,
    DeviceError,
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index import BlockPool, BlockTables, RadixTree, RequestTable, SlotAllocator, StepBuffers
from pagecore.models import ConfigError, specs_from_config
from pagecore.ops import (
    AttentionPlan,
    copy_blocks,
    debug,
    gather_blocks,
    merge_attention,
    paged_attention,
    plan_attention,
    scatter_blocks,
    transfer_blocks,
    write_kv,
)
from pagecore.ops.cpu import available_isas, isa, num_threads, set_isa, set_num_threads
from pagecore.storage import AttentionSpec, KVLayout, KVPool, LatentSpec, Plane, TensorParallel

__version__ = "0.1.0"

__all__ = [
    "Alias",
    "AttentionPlan",
    "AttentionSpec",
    "Batch",
    "BatchGroup",
    "BlockMap",
    "BlockPool",
    "BlockTables",
    "CacheStats",
    "CompileError",
    "ConfigError",
    "DType",
    "DeviceError",
    "DoubleFree",
    "InvalidBlock",
    "InvalidSequence",
    "KVCache",
    "KVLayout",
    "KVPool",
    "LatentSpec",
    "NotEnoughMemory",
    "OutOfBlocks",
    "OutOfRows",
    "PagecoreError",
    "PagedCacheConfig",
    "PagedKVCache",
    "Plane",
    "RadixTree",
    "RequestTable",
    "Sequence",
    "ShapeError",
    "SlotAllocator",
    "StaticCacheConfig",
    "StaticKVCache",
    "StepBuffers",
    "SwapSpace",
    "Tensor",
    "TensorParallel",
    "UnsupportedDtype",
    "UnsupportedOption",
    "as_dtype",
    "as_tensor",
    "available_isas",
    "copy_blocks",
    "debug",
    "effective_length",
    "empty",
    "gather_blocks",
    "isa",
    "make_cache",
    "merge_attention",
    "num_threads",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "set_isa",
    "set_num_threads",
    "specs_from_config",
    "transfer_blocks",
    "write_kv",
    "zeros",
]
