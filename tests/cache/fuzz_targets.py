"""Public classes, their methods, and valid arguments of each; foreign arguments come from `foreign`.

A method is "name argument:kind ... option!kind ... option=kind": arguments are passed by position and options by name;
those with "=" are sometimes left out. A kind names the method of the target that makes a valid value.
"""

import numpy as np

from pagecore import (
    AttentionSpec,
    KVLayout,
    KVPool,
    Plane,
    StaticKVCache,
    TensorParallel,
    effective_length,
)
from pagecore.cache import Alias
from tests.cache.fuzz_base import SPEC, Target
from tests.cache.fuzz_index import Index, Radix
from tests.cache.fuzz_paged import Paged


class Static(Target):
    methods = (
        "cache.update layer:layer key:tokens value:tokens position:one stream=none",
        "cache.key layer:layer",
        "cache.value layer:layer",
        "cache.length layer:layer",
        "cache.spec layer:layer",
        "cache.reset stream=none",
        "StaticKVCache spec:spec num_layers=some max_batch_size=some max_length=some device=device parallel=parallel",
    )

    def __init__(self, random):
        super().__init__(random)
        cache = StaticKVCache(SPEC, 2, max_batch_size=2, max_length=16)
        self.named = {"StaticKVCache": StaticKVCache, "cache": cache}

    def mischief(self):
        self.named["cache"].reset()

    def layer(self):
        return int(self.random.integers(2))

    def tokens(self):
        return np.ones((2, 2, 3, 8), np.float32)


class Storage(Target):
    methods = (
        "KVPool spec:spec num_layers:some num_blocks:blocks block_size=some layout=layout device=device buffers=none",
        "pool.plane name:plane layer=one",
        "pool.key layer=one",
        "pool.value layer=one",
        "KVPool.blocks_for memory:memory spec:spec num_layers:some block_size=some device=device",
        "KVLayout order:layout heads=heads planes=spec num_layers=some num_blocks=some block_size=some",
        "layout.bind planes:spec num_layers:some num_blocks:blocks block_size:some",
        "bound.block_offset block:one layer=one",
        "bound.buffer_nbytes buffer=one",
        "bound.plane_layout index:one",
        "AttentionSpec num_kv_heads:some head_dim:some v_head_dim=some dtype=dtype window=some num_query_heads=some "
        "scale=number softcap=number sinks=ids",
        "Plane name:plane shape:ids dtype:dtype per=per",
        "TensorParallel rank:one size:some",
        "parallel.heads num_kv_heads:some",
        "parallel.query_heads num_query_heads:some",
        "parallel.shard spec:spec",
        "Alias target:one",
        "effective_length configured:some model_maximum:some",
    )

    def __init__(self, random):
        super().__init__(random)
        classes = (KVPool, KVLayout, AttentionSpec, Plane, TensorParallel, Alias)
        self.named = {one.__name__: one for one in classes} | {
            "effective_length": effective_length,
            "pool": KVPool(SPEC, 2, 5, 4),
            "layout": KVLayout(),
            "bound": KVLayout().bind(SPEC.planes, 2, 5, 4),
            "parallel": TensorParallel(1, 2),
        }

    def blocks(self):
        return int(self.random.integers(2, 9))

    def plane(self):
        return "key"

    def memory(self):
        return "1MiB"

    def heads(self):
        return "HND"

    def per(self):
        return "token"


TARGETS = {one.__name__: one for one in (Paged, Static, Storage, Index, Radix)}
