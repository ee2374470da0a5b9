"""Small caches for host tiers, and prompts served by them."""

from pagecore import AttentionSpec, PagedKVCache

SPEC = AttentionSpec(1, 8, dtype="float32")


def cached(num_blocks=9, **options):
    return PagedKVCache(SPEC, **({"num_blocks": num_blocks, "block_size": 4, "device": "none"} | options))


def serve(cache, ids, **options):
    """Compute what a prompt lacks, remove it, and return the tokens that it reused."""
    sequence = cache.add_sequence(ids, **options)
    reused = sequence.num_cached_tokens
    cache.commit(cache.prepare([sequence], len(ids) - reused))
    cache.remove(sequence)
    return reused
