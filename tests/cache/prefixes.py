"""Helpers of the prefix cache's tests."""

from tests.cache.caches import advance
from tests.cache.swaps import fill

ALIKE = list(range(40))


def computed(cache, tokens, **options):
    """Return a sequence whose every token is computed, with random keys and values."""
    sequence = cache.add_sequence(tokens, **options)
    left = sequence.num_tokens - sequence.num_computed_tokens
    if cache.device == "cpu":
        fill(cache, [sequence], left, seed=sequence.num_tokens)
    else:
        advance(cache, [sequence], left)
    return sequence


def kept(cache, tokens, **options):
    """Compute a sequence and remove it."""
    cache.remove(computed(cache, tokens, **options))


def used_by_rows(cache, sequences):
    rows = cache.block_table().numpy()[[sequence.row for sequence in sequences]]
    return len(set(rows.ravel().tolist()) - {0})
