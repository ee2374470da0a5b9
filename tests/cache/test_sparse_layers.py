"""Layers with summaries of keys: their specs, and the selected attention of a cache."""

import numpy as np
import pytest

from pagecore import AttentionSpec, ShapeError, TensorParallel, UnsupportedOption, score_blocks, score_tokens, select
from tests.cache.caches import make, normal
from tests.reference.attention import paged_attention as reference

CHANNELS = [[0, 3, 5], [7, 1, 2]]
SPARSE = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, key_bounds=True, label_channels=CHANNELS)


def test_the_planes_of_summaries_follow_those_of_keys_and_values():
    names = [(plane.name, plane.shape, plane.per, str(plane.dtype)) for plane in SPARSE.planes]
    assert names[2:] == [
        ("key_min", (2, 8), "block", "float32"),
        ("key_max", (2, 8), "block", "float32"),
        ("label", (2, 3), "token", "float32"),
    ]
    assert [plane.name for plane in AttentionSpec(2, 8, label_channels=CHANNELS).planes] == ["key", "value", "label"]
    assert hash(SPARSE) == hash(AttentionSpec(2, 8, **{
        "dtype": "float32", "num_query_heads": 4, "key_bounds": True, "label_channels": np.array(CHANNELS)
    }))  # fmt: skip


def test_a_format_stores_its_summaries_in_the_compute_dtype():
    planes = AttentionSpec(2, 16, format="int8_token", key_bounds=True).planes
    assert [(plane.name, str(plane.dtype)) for plane in planes[-2:]] == [
        ("key_min", "bfloat16"),
        ("key_max", "bfloat16"),
    ]


def test_a_rank_has_the_channels_of_its_heads():
    for rank in range(2):
        assert TensorParallel(rank, 2).shard(SPARSE).label_channels == (tuple(CHANNELS[rank]),)
    no_queries = AttentionSpec(2, 8, label_channels=CHANNELS)
    assert TensorParallel(1, 2).shard(no_queries).label_channels == (tuple(CHANNELS[1]),)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"key_bounds": 1}, UnsupportedOption, "key_bounds is 1"),
        ({"label_channels": [[0]]}, ShapeError, "one list of channels for each of 2"),
        ({"label_channels": [[0], [1, 2]]}, ShapeError, "lists 1, 2 channels"),
        ({"label_channels": [[], []]}, ShapeError, "at least 1"),
        ({"label_channels": [[0], [8]]}, ShapeError, "at most 7"),
        ({"label_channels": 3}, ShapeError, "one list of channels"),
    ],
)
def test_specs_refuse(options, kind, message):
    with pytest.raises(kind, match=message):
        AttentionSpec(2, 8, **options)


@pytest.mark.parametrize("by_block", [True, False], ids=["blocks", "tokens"])
def test_a_cache_scores_selects_and_attends(by_block):
    cache = make([SPARSE, SPARSE], num_blocks=40)
    first, second = cache.add_sequence(range(30)), cache.add_sequence(range(100, 117))
    key, value, query = normal(47, 2, 8), normal(47, 2, 8, seed=1), normal(47, 4, 8, seed=2)
    batch = cache.prepare([first, second], [30, 17])
    cache.write(1, key, value, batch)
    cache.commit(batch)
    cache.append_tokens([first, second], [1, 2])
    batch = cache.prepare([first, second], 1, out=cache.make_batch())
    cache.write(1, key[:2], value[:2], batch)
    table = batch.group(1).block_table
    given = {"rows": batch.rows, "cu_query_lens": batch.cu_query_lens}
    if by_block:
        bounds = [cache.plane(name, 1) for name in ("key_min", "key_max")]
        scores = score_blocks(query[:2], *bounds, table, batch.seq_lens, block_size=4, **given)
        positions, counts = select(scores, 2, lens=[8, 5], sinks=1, recent=1)
        chosen = {"blocks": positions, "block_counts": counts}
    else:
        scores = score_tokens(query[:2], cache.plane("label", 1), CHANNELS, table, batch.seq_lens, **given)
        positions, counts = select(scores, 6, lens=[31, 18], sinks=1, recent=2)
        chosen = {"indices": positions, "index_counts": counts}
    assert len(batch.seq_lens) > 2  # padding has no lists
    got = cache.attend(1, query[:2], batch, **chosen)
    unit = 4 if by_block else 1
    for head in range(2):
        masks = [np.zeros((1, n), bool) for n in (31, 18)]
        for mask, row in zip(masks, positions[:, head], strict=True):
            for entry in row[row >= 0]:
                mask[0, entry * unit : (entry + 1) * unit] = True
        expected, _ = reference(
            query[:2, 2 * head : 2 * head + 2],
            cache.key(1).numpy()[:, :, head : head + 1],
            cache.value(1).numpy()[:, :, head : head + 1],
            np.asarray(table),
            [31, 18],
            rows=[first.row, second.row],
            mask=np.concatenate([mask.reshape(-1) for mask in masks]),
        )
        assert np.allclose(got[:, 2 * head : 2 * head + 2], expected, rtol=1e-5, atol=1e-6)
    cache.commit(batch)
