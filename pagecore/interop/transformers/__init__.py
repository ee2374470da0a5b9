"""A paged key-value cache for `model.generate` of Hugging Face transformers.

Importing this package registers the attention implementation "pagecore"::

    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=1024)
    model.generate(**inputs, past_key_values=cache)
"""

from pagecore.interop.transformers.attention import register
from pagecore.interop.transformers.cache import PagedCache
from pagecore.interop.transformers.crossed import PagedEncoderDecoderCache

__all__ = ["PagedCache", "PagedEncoderDecoderCache"]

register()
