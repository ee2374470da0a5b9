"""A substitute for a model: keys, values and queries follow from token and position, and outputs from the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, Sequence
from tests.reference.attention import paged_attention as reference
from tests.reference.trees import ancestors

Array = np.ndarray[Any, Any]
HEADS, KV_HEADS, DIM = 4, 2, 16


def numbers(ids: Any, positions: Any, layer: int, heads: int, kind: int) -> Array:
    """Return float32 ``[n, heads, DIM]``."""
    ids, positions = (np.asarray(each, np.float64)[:, None, None] for each in (ids, positions))
    head, dim = np.arange(heads)[:, None], np.arange(DIM)
    phase = (1.3 + kind) * ids + 0.37 * positions * (dim + 1) + 2.1 * head + layer
    return (1.5 * np.sin(phase)).astype(np.float32)


def key_of(ids: Any, positions: Any, layer: int) -> Array:
    return numbers(ids, positions, layer, KV_HEADS, 0)


def value_of(ids: Any, positions: Any, layer: int) -> Array:
    return numbers(ids, positions, layer, KV_HEADS, 1)


def query_of(ids: Any, positions: Any, layer: int) -> Array:
    return numbers(ids, positions, layer, HEADS, 2)


def expected(spec: AttentionSpec, ids: list[int], layer: int) -> Array:
    """Return the output of the last of these tokens, computed from scratch: float64 ``[HEADS, DIM]``."""
    positions = np.arange(len(ids))
    caches = (each(ids, positions, layer)[None] for each in (key_of, value_of))
    query = query_of(ids[-1:], positions[-1:], layer)
    limits = {"window": spec.window, "chunk": spec.chunk}
    return reference(query, *caches, np.zeros((1, 1), np.int32), [len(ids)], **limits)[0][0]


def compute(cache: PagedKVCache, specs: list[AttentionSpec], batch: Any, ids: Any) -> list[Array]:
    """Write and attend in every layer; return the outputs of each."""
    positions = np.asarray(batch.host.positions)[: batch.num_tokens]
    outputs = []
    for layer in range(len(specs)):
        cache.write(layer, key_of(ids, positions, layer), value_of(ids, positions, layer), batch)
        outputs.append(cache.attend(layer, query_of(ids, positions, layer), batch))
    return outputs


def check_step(
    specs: list[AttentionSpec],
    outputs: list[Array],
    ids: list[list[int]],
    trees: list[list[int]],
    texts: list[list[int]],
) -> None:
    """Compare the output of every token of a step with that of its path from scratch."""
    first = 0
    for drafts, parents, text in zip(ids, trees, texts, strict=True):
        for token in range(len(drafts)):
            path = text + [drafts[at] for at in ancestors(parents, token)]
            for layer, spec in enumerate(specs):
                np.testing.assert_allclose(
                    outputs[layer][first + token], expected(spec, path, layer), rtol=2e-4, atol=2e-4
                )
        first += len(drafts)


def slots_of(cache: PagedKVCache, sequence: Sequence, layer: int) -> Array:
    """Return the slots of the computed tokens of a sequence."""
    table = np.asarray(cache.block_table(layer))[sequence.row]
    at = np.arange(sequence.num_computed_tokens)
    return table[at // cache.block_size] * cache.block_size + at % cache.block_size


def check_stored(cache: PagedKVCache, specs: list[AttentionSpec], sequence: Sequence) -> None:
    """Compare the stored keys and values that the next token sees with those of the sequence's ids."""
    ids = sequence.tokens[: sequence.num_computed_tokens]
    for layer, spec in enumerate(specs):
        first = 0 if spec.window is None else max(0, len(ids) - spec.window + 1)
        if spec.chunk is not None:
            first = len(ids) // spec.chunk * spec.chunk
        slots = slots_of(cache, sequence, layer)[first:]
        for plane, make in ((cache.key(layer), key_of), (cache.value(layer), value_of)):
            stored = np.asarray(plane)[slots // cache.block_size, slots % cache.block_size]
            np.testing.assert_array_equal(stored, make(ids, np.arange(len(ids)), layer)[first:])
