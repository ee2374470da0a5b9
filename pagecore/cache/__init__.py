"""What a user holds: the cache, its sequences and its batches."""

from pagecore.cache._sequence import Sequence
from pagecore.cache.batch import Batch, BatchGroup
from pagecore.cache.block_map import BlockMap
from pagecore.cache.layers import Alias
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.stats import CacheStats

__all__ = ["Alias", "Batch", "BatchGroup", "BlockMap", "CacheStats", "PagedKVCache", "Sequence"]
