"""Caches with summaries of keys on a CUDA device: selected attention, and compaction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, score_blocks, score_tokens, select
from pagecore.errors import DeviceError, OutOfBlocks
from tests.cache.caches import SPEC, make, normal
from tests.cache.test_sparse_layers import CHANNELS, SPARSE
from tests.cache.texts import OTHER, Texts
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.reference.attention import paged_attention as reference

KEPT = [[], [7], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [1, 2, 3, 5, 6, 7]]


@pytest.mark.parametrize("by_block", [True, False], ids=["blocks", "tokens"])
def test_a_cache_scores_selects_and_attends(cuda, by_block):
    cache = make([SPARSE, SPARSE], num_blocks=40, device=cuda.device)
    first, second = cache.add_sequence(range(30)), cache.add_sequence(range(100, 117))
    key, value, query = normal(47, 2, 8), normal(47, 2, 8, seed=1), normal(47, 4, 8, seed=2)
    batch = cache.prepare([first, second], [30, 17])
    cache.write(1, cuda.put(key), cuda.put(value), batch)
    cache.commit(batch)
    cache.append_tokens([first, second], [1, 2])
    batch = cache.prepare([first, second], 1, out=cache.make_batch())
    cache.write(1, cuda.put(key[:2]), cuda.put(value[:2]), batch)
    table, new = batch.group(1).block_table, cuda.put(query[:2])
    given = {"rows": batch.rows, "cu_query_lens": batch.cu_query_lens}
    if by_block:
        bounds = [cache.plane(name, 1) for name in ("key_min", "key_max")]
        scores = score_blocks(new, *bounds, table, batch.seq_lens, block_size=4, **given)
        positions, counts = select(scores, 2, lens=[8, 5], sinks=1, recent=1)
        chosen = {"blocks": positions, "block_counts": counts}
    else:
        channels = cuda.put(np.array(CHANNELS, np.int32))
        scores = score_tokens(new, cache.plane("label", 1), channels, table, batch.seq_lens, **given, max_len=31)
        positions, counts = select(scores, 6, lens=[31, 18], sinks=1, recent=2)
        chosen = {"indices": positions, "index_counts": counts}
    assert len(batch.seq_lens) > 2  # padding has no lists
    got = cuda.get(cache.attend(1, new, batch, **chosen))
    unit, lists = 4 if by_block else 1, cuda.get(positions)
    for head in range(2):
        masks = [np.zeros((1, n), bool) for n in (31, 18)]
        for mask, row in zip(masks, lists[:, head], strict=True):
            for entry in row[row >= 0]:
                mask[0, entry * unit : (entry + 1) * unit] = True
        expected, _ = reference(
            query[:2, 2 * head : 2 * head + 2],
            cuda.get(cache.key(1))[:, :, head : head + 1],
            cuda.get(cache.value(1))[:, :, head : head + 1],
            cuda.get(table),
            [31, 18],
            rows=[first.row, second.row],
            mask=np.concatenate([mask.reshape(-1) for mask in masks]),
        )
        assert np.allclose(got[:, 2 * head : 2 * head + 2], expected, rtol=1e-5, atol=1e-6)
    cache.commit(batch)


def prefilled(cuda: Kit, count: int = 8, **options: Any) -> tuple[Texts, Any]:
    cache = make(**{"layers": [SPARSE, SPARSE], "device": cuda.device, **options})
    texts = Texts(cache, cuda.put, cuda.get)
    sequence = texts.add(list(range(count)))
    texts.step([sequence], [count])
    return texts, sequence


@pytest.mark.parametrize("layout", cases(["layerwise", "LCBHND"], ["layerwise", "blockwise", "LCBHND"]))
@pytest.mark.parametrize("keep", KEPT, ids=str)
def test_kept_tokens_move_in_any_layout(cuda, layout, keep):
    texts, sequence = prefilled(cuda, 10, layout=layout, layers=[SPEC, OTHER, SPEC])
    texts.compact(sequence, keep)
    texts.check()
    texts.append(sequence, [90, 91, 92])
    texts.step([sequence], [3])
    texts.check()


def test_bounds_are_renewed_and_labels_move(cuda):
    texts, sequence = prefilled(cuda, 11)
    texts.compact(sequence, [1, 4, 6, 7, 8, 10])
    texts.check()
    texts.append(sequence, [5])
    texts.step([sequence], [1])
    texts.check()


def test_long_moves_overlap(cuda):
    """Sources of 300 tokens overlap their targets; each moves by one or more slots."""
    texts, sequence = prefilled(cuda, 300, num_blocks=80, prefix_cache=False, max_tokens_per_sequence=320)
    texts.compact(sequence, [i for i in range(300) if i not in (0, 5, 6, 250)])
    texts.check()


def test_published_blocks_are_left_alone(cuda):
    texts, sequence = prefilled(cuda, 12)
    texts.compact(sequence, [0, 1, 2, 3, 5, 8, 9])
    again = texts.add([*range(12), 7])
    assert again.num_cached_tokens == 12
    texts.append(sequence, [60, 61])
    texts.step([sequence, again], [2, 1])
    texts.check()


def test_a_compaction_that_fails_changes_nothing(cuda):
    texts, sequence = prefilled(cuda, 8, num_blocks=3)
    with pytest.raises(OutOfBlocks):
        texts.compact(sequence, [1, 2])
    texts.check()


def test_a_capture_is_refused(cuda):
    texts, sequence = prefilled(cuda)

    def work(stream: int) -> None:
        texts.cache._parts.staging.stream = stream
        with pytest.raises(DeviceError, match="captured"):
            texts.cache.compact(sequence, [0, 2])

    cuda.capture(work)


def test_specs_with_summaries_make_caches_on_a_device(cuda):
    spec = AttentionSpec(2, 16, format="int8_token", key_bounds=True)
    cache = make(spec, device=cuda.device)
    sequence = cache.add_sequence(range(6))
    batch = cache.prepare([sequence], 6)
    key = normal(6, 2, 16)
    cache.write(0, cuda.put(key), cuda.put(key), batch)
    cache.commit(batch)
    block = int(cache._parts.tables.blocks(sequence.row, 0)[0])
    low = cuda.get(cache.plane("key_min", 0))[block].astype(np.float32)
    np.testing.assert_allclose(low, key[:4].min(axis=0), rtol=0.01)
