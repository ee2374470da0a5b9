"""The paged key-value cache of a transformer, as a library that belongs to no framework.

Tokens become blocks, blocks become slots; key and value are written to slots, and attention reads them through block
tables. `PagedKVCache` conducts; `BlockPool` and `BlockTables` decide which memory a token gets; `write_kv` and
`paged_attention` work on any arrays that speak DLPack.
"""

from importlib.metadata import PackageNotFoundError, version

from pagecore.arrays import DType, Tensor, as_dtype, as_tensor, empty, zeros
from pagecore.cache import Alias, Batch, BatchGroup, CacheStats, PagedKVCache, Sequence
from pagecore.errors import (
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
from pagecore.index import BlockPool, BlockTables, StepBuffers
from pagecore.ops import (
    AttentionPlan,
    copy_blocks,
    merge_attention,
    paged_attention,
    plan_attention,
    write_kv,
)
from pagecore.ops.cpu import available_isas, isa, set_isa
from pagecore.storage import AttentionSpec, KVLayout, KVPool, Plane

try:
    __version__ = version("pagecore")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "Alias",
    "AttentionPlan",
    "AttentionSpec",
    "Batch",
    "BatchGroup",
    "BlockPool",
    "BlockTables",
    "CacheStats",
    "DType",
    "DeviceError",
    "DoubleFree",
    "InvalidBlock",
    "InvalidSequence",
    "KVLayout",
    "KVPool",
    "NotEnoughMemory",
    "OutOfBlocks",
    "OutOfRows",
    "PagecoreError",
    "PagedKVCache",
    "Plane",
    "Sequence",
    "ShapeError",
    "StepBuffers",
    "Tensor",
    "UnsupportedDtype",
    "UnsupportedOption",
    "as_dtype",
    "as_tensor",
    "available_isas",
    "copy_blocks",
    "empty",
    "isa",
    "merge_attention",
    "paged_attention",
    "plan_attention",
    "set_isa",
    "write_kv",
    "zeros",
]
