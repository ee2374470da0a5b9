"""Texts with a key and a value for each token, and caches that hand over sequences of them."""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, gather_blocks, scatter_blocks
from tests.cache.caches import normal
from tests.reference.dense import dense_attention

MOST = 200  # tokens of a text


class Text:
    """Token ids, and the queries, keys and values that a model with these layers computes from them."""

    def __init__(self, windows=(None, 32), seed=0):
        self.windows = windows
        self.ids = [1000 * seed + i for i in range(MOST)]
        self.key, self.value = (
            [normal(MOST, 2, 8, seed=(seed, layer, part)) for layer in range(len(windows))] for part in (0, 1)
        )
        self.query = [normal(MOST, 4, 8, seed=(seed, layer, 2)) for layer in range(len(windows))]


def make(windows=(None, 32), **options):
    specs = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=window) for window in windows]
    defaults = {"block_size": 16, "num_blocks": [40] * len(windows), "max_tokens_per_sequence": MOST}
    return PagedKVCache(specs, **defaults | options)


def compute(cache, sequence, text, count):
    """Compute the next tokens of a sequence, its attention compared with float64 over the whole text."""
    start = sequence.num_computed_tokens
    end = start + count
    with cache.prepare([sequence], count) as batch:
        for layer, window in enumerate(text.windows):
            cache.write(layer, text.key[layer][start:end], text.value[layer][start:end], batch)
            found = cache.attend(layer, text.query[layer][start:end], batch)
            expected = dense_attention(
                text.query[layer][start:end], text.key[layer][:end], text.value[layer][:end], window=window
            )
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        cache.commit(batch)


def computed(cache, text, length, known=None):
    sequence = cache.add_sequence(text.ids[: length if known is None else known])
    compute(cache, sequence, text, length - sequence.num_computed_tokens)
    return sequence


def gathered(cache, sequence):
    """Return key and value of each layer; NaN for tokens that the cache no longer has."""
    packed = []
    for layer in range(cache.num_layers):
        group = cache.group_of(layer)
        planes = [cache.key(layer), cache.value(layer)]
        table = cache.block_table(group)
        pair = gather_blocks(planes, table, [sequence.num_computed_tokens], rows=[sequence.row])
        arrays = [np.array(plane) for plane in pair]
        for array in arrays:
            array[: cache.held_from(sequence, group)] = np.nan
        packed.append(arrays)
    return packed


def receive(cache, sequence, packed, length=None, *, by_table=False, **options):
    """Hand over the tokens after those that the sequence has, up to `length`."""
    start = sequence.num_computed_tokens
    end = len(packed[0][0]) if length is None else length
    batch = cache.prepare_arrival(sequence, end - start, **options)
    write_arrived(cache, sequence, packed, batch, start, end, by_table=by_table)
    cache.commit(batch)
    assert sequence.num_computed_tokens == end


def write_arrived(cache, sequence, packed, batch, start, end, *, by_table=False):
    for layer, (key, value) in enumerate(packed):
        if not by_table:
            cache.write(layer, key[start:end], value[start:end], batch)
            continue
        assert start % cache.block_size == 0
        table = np.asarray(cache.block_table(cache.group_of(layer)))[[sequence.row], start // cache.block_size :]
        scatter_blocks([key[start:end], value[start:end]], [cache.key(layer), cache.value(layer)], table, [end - start])


def check_content(cache, sequence, text):
    """Assert that every token that a group has and the next token sees is that of the text."""
    length = sequence.num_computed_tokens
    for layer, window in enumerate(text.windows):
        first = cache.held_from(sequence, cache.group_of(layer))
        seen = 0 if window is None else max(0, length - window + 1)
        assert first % cache.block_size == 0
        assert first <= seen
        # The prefix cache also keeps one token for a window of 1.
        assert window is None or first > length - max(window, 2) + 1 - cache.block_size
        planes = [cache.key(layer), cache.value(layer)]
        table = cache.block_table(cache.group_of(layer))
        key, value = gather_blocks(planes, table, [length], rows=[sequence.row])
        np.testing.assert_array_equal(key[first:], text.key[layer][first:length])
        np.testing.assert_array_equal(value[first:], text.value[layer][first:length])


def taken_first(cache, length, window):
    """Return the first block that the token at position `length` sees."""
    return 0 if window is None else max(0, length - window + 1) // cache.block_size


def reusable(cache, text, length, present):
    """Return the tokens of a prompt of `length` that a cache with the blocks `present` of each layer reuses."""
    size = cache.block_size
    for count in range((length - 1) // size, 0, -1):
        firsts = [0 if window is None else max(0, count * size - max(window - 1, 1)) // size for window in text.windows]
        if all(set(range(first, count)) <= blocks for first, blocks in zip(firsts, present, strict=True)):
            return count * size
    return 0
