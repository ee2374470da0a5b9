"""Sparse selection on CUDA arrays: every function refuses by name, and writes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache, UnsupportedOption
from tests.cache.caches import SPEC, advance


def test_attention_refuses_selections(cuda):
    cache = cuda.put(np.zeros((3, 16, 1, 64), np.float32))
    query = cuda.put(np.ones((1, 1, 64), np.float32))
    for name in ("blocks", "indices"):
        with pytest.raises(UnsupportedOption, match=f"{name} selects keys on the host only"):
            pagecore.paged_attention(query, cache, cache, [[1]], [16], **{name: [[[0]]]})


def test_writes_refuse_summaries(cuda):
    cache, other = (cuda.put(np.zeros((3, 16, 1, 64), np.float32)) for _ in range(2))
    new = cuda.put(np.ones((1, 1, 64), np.float32))
    bounds = cuda.put(np.zeros((3, 1, 64), np.float32))
    with pytest.raises(UnsupportedOption, match="key_min is kept up on the host only"):
        pagecore.write_kv(new, new, cache, other, [16], key_min=bounds, key_max=bounds)
    assert not cuda.get(cache).any()


def test_scores_and_selections_run_on_the_host(cuda):
    query, bounds = cuda.put(np.zeros((1, 2, 8), np.float32)), cuda.put(np.zeros((3, 1, 8), np.float32))
    with pytest.raises(UnsupportedOption, match="runs on the host"):
        pagecore.score_blocks(query, bounds, bounds, [[0]], [1], block_size=16)
    with pytest.raises(UnsupportedOption, match="runs on the host"):
        pagecore.score_tokens(query, bounds, [[0]], [[0]], [1])
    with pytest.raises(UnsupportedOption, match="runs on the host"):
        pagecore.select(cuda.put(np.zeros((1, 4), np.float32)), 1, lens=4)


def test_caches_refuse_summaries_and_compaction(cuda):
    with pytest.raises(UnsupportedOption, match="only the host keeps up"):
        PagedKVCache(AttentionSpec(2, 8, key_bounds=True), num_blocks=4, device=cuda.device)
    cache = PagedKVCache(SPEC, block_size=4, num_blocks=9, device=cuda.device)
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    with pytest.raises(UnsupportedOption, match="use device='cpu'"):
        cache.compact(sequence, [0, 5])
    cache.check_invariants()
