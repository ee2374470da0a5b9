"""PagedKVCache with latent layers: steps, plans, prefixes and forks against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import LatentSpec, PagedKVCache, errors, index_scores, select_topk, slots_of, write_index
from tests.reference import latent as reference

SPEC = {"latent_dim": 48, "rope_dim": 16, "num_query_heads": 4, "scale": 0.2, "dtype": "float32"}


class Model:
    """Random latents of every position, and a cache that holds them."""

    def __init__(self, **options):
        self.rng = np.random.default_rng(0)
        self.spec = LatentSpec(**{**SPEC, **options})
        self.cache = PagedKVCache(layers=[self.spec] * 2, num_blocks=64, block_size=4, max_sequences=8)
        self.latents = self.rng.standard_normal((2, 40, 64)).astype(np.float32)

    def step(self, sequences, counts):
        """Run a step; return the outputs of both layers, and the queries."""
        starts = [sequence.num_computed_tokens for sequence in sequences]
        batch = self.cache.prepare(sequences, counts)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        query = self.rng.standard_normal((len(positions), 4, 64)).astype(np.float32)
        outs = []
        for layer in range(2):
            new = self.latents[layer, positions]
            self.cache.write(layer, new[:, :48], new[:, 48:], batch)
            outs.append(self.cache.attend(layer, (query[..., :48], query[..., 48:]), batch))
        return batch, outs, query, positions

    def expect(self, layer, query, positions):
        window = self.spec.window or 1000
        rows = [self.latents[layer, max(0, p + 1 - window) : p + 1] for p in positions]
        return [reference.attend(q, r, r[:, :48], 0.2)[0] for q, r in zip(query, rows, strict=True)]


@pytest.mark.parametrize("options", [{}, {"joint": False}, {"window": 6}, {"num_query_heads": None}])
def test_prefill_and_decode(options):
    model = Model(**options)
    sequences = [model.cache.add_sequence(list(range(n))) for n in (9, 4)]
    for counts in ([9, 4], [1, 1], [1, 1]):
        if counts == [1, 1]:
            for sequence in sequences:
                model.cache.append_tokens([sequence], [[sequence.num_tokens]])
        batch, outs, query, positions = model.step(sequences, counts)
        for layer in range(2):
            np.testing.assert_allclose(outs[layer], model.expect(layer, query, positions), atol=1e-5)
        model.cache.commit(batch)


def test_a_prefix_is_reused():
    model = Model()
    first = model.cache.add_sequence(list(range(12)))
    batch, *_ = model.step([first], [12])
    model.cache.commit(batch)
    model.cache.remove(first)
    second = model.cache.add_sequence(list(range(14)))
    assert second.num_computed_tokens == 12
    _, outs, query, positions = model.step([second], [2])
    np.testing.assert_allclose(outs[1], model.expect(1, query, positions), atol=1e-5)


def test_sparse_steps_select_by_the_indexer():
    model = Model(index_dim=32)
    sequence = model.cache.add_sequence(list(range(20)))
    batch = model.cache.prepare([sequence], [20])
    group, rng = batch.group(0), np.random.default_rng(1)
    model.cache.write(0, model.latents[0, :20, :48], model.latents[0, :20, 48:], batch)
    planes = [model.cache.plane(name, 0) for name in ("index_key", "index_scale")]
    write_index(rng.standard_normal((20, 32)).astype(np.float32), *planes, group.slot_mapping)
    query, weights = rng.standard_normal((20, 2, 32)).astype(np.float32), np.ones((20, 2), np.float32)
    lists = {"rows": batch.rows, "cu_query_lens": batch.cu_query_lens}
    scores = index_scores(query, weights, *planes, group.block_table, batch.seq_lens, **lists)
    positions = select_topk(scores, 5)
    slots = slots_of(positions, group.block_table, 4, **lists)
    absorbed = rng.standard_normal((20, 4, 64)).astype(np.float32)
    out = model.cache.attend(0, (absorbed[..., :48], absorbed[..., 48:]), batch, indices=slots)
    for token, chosen in enumerate(positions):
        assert (chosen <= token).all()
        rows = model.latents[0, [p for p in chosen if p >= 0]]
        np.testing.assert_allclose(out[token], reference.attend(absorbed[token], rows, rows[:, :48], 0.2)[0], atol=1e-5)


def test_a_query_that_is_not_a_pair_is_refused():
    model = Model()
    sequence = model.cache.add_sequence([1, 2])
    batch = model.cache.prepare([sequence], [2])
    with pytest.raises(errors.UnsupportedOption, match="query_latent, query_rope"):
        model.cache.attend(0, np.zeros((2, 4, 64), np.float32), batch)
    with pytest.raises(errors.ShapeError, match="latent has 1 tokens"):
        model.cache.write(0, np.zeros((1, 48), np.float32), np.zeros((1, 16), np.float32), batch)
