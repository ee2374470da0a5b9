"""A paged key-value cache for `model.generate` of Hugging Face transformers.

Importing this package registers the attention implementation "pagecore"::

    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=1024)
    model.generate(**inputs, cache=cache)
"""

from pagecore.interop.transformers.cache import PagedCache
from pagecore.interop.transformers.crossed import PagedEncoderDecoderCache
from pagecore.interop.transformers.generate_batch.attention import register_batched
from pagecore.interop.transformers.generate_batch.use import BatchedAttention, use_in_generate_batch
from pagecore.interop.transformers.layers.attention import register

__all__ = ["BatchedAttention", "PagedCache", "PagedEncoderDecoderCache", "use_in_generate_batch"]

register()
register_batched()
