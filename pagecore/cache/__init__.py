"""Caches, their sequences and batches, and the values that configure and describe them."""

from pagecore.cache.config import PagedCacheConfig, StaticCacheConfig, effective_length, make_cache
from pagecore.cache.embeddings import EmbeddingCache
from pagecore.cache.inspect.block_map import BlockMap
from pagecore.cache.inspect.stats import CacheStats
from pagecore.cache.layers.inputs import BatchGroup
from pagecore.cache.lifecycle._lifecycle import PrefixPin
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.protocol import KVCache
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.static.static import StaticKVCache
from pagecore.cache.step.batch import Batch, CrossArrays
from pagecore.cache.swap.space import SwapSpace
from pagecore.storage import Alias

__all__ = [
    "Alias",
    "Batch",
    "BatchGroup",
    "BlockMap",
    "CacheStats",
    "CrossArrays",
    "EmbeddingCache",
    "KVCache",
    "PagedCacheConfig",
    "PagedKVCache",
    "PrefixPin",
    "Sequence",
    "StaticCacheConfig",
    "StaticKVCache",
    "SwapSpace",
    "effective_length",
    "make_cache",
]
