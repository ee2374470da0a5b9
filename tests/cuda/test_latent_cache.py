"""Layers with latents in a cache on a device: written, shared, copied on write, reused and swapped."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import (
    LatentSpec,
    PagedKVCache,
    SwapSpace,
    gather_latent,
    index_scores,
    paged_attention,
    slots_of,
    write_index,
    write_latent,
)
from pagecore.arrays import strided
from tests.cuda.caches import assert_device_tables, block_bytes, poison
from tests.cuda.kit import Kit
from tests.reference.dense import dense_attention

BF16 = ml_dtypes.bfloat16
HEADS, SCALE = 4, 0.05
SPECS = {
    "joint": LatentSpec(40, 16, HEADS, scale=SCALE),
    "apart": LatentSpec(40, 16, HEADS, scale=SCALE, dtype="float32", joint=False),
    "window": LatentSpec(40, 16, HEADS, scale=SCALE, window=5),
    "float8": LatentSpec(40, 16, HEADS, scale=SCALE, format="float8_e4m3fn", key_scale=0.05),
    "fp8_ds_mla": LatentSpec(512, 64, HEADS, scale=SCALE, format="fp8_ds_mla"),
    "nvfp4_ds_mla": LatentSpec(512, 64, HEADS, scale=SCALE, format="nvfp4_ds_mla"),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)


def make(cuda: Kit, name: str, **options: Any) -> PagedKVCache:
    """Return a cache whose free blocks hold NaN."""
    sizes = {"block_size": 4, "num_blocks": 24, "max_sequences": 5}
    cache = PagedKVCache([SPECS[name]] * 2, **sizes | options, device=cuda.device)
    spoil(cuda, cache)
    return cache


def spoil(cuda: Kit, cache: PagedKVCache) -> None:
    """Fill free blocks with bytes that read as NaN, also in planes of bytes."""
    poison(cuda, cache, 255 if "uint8" in {str(plane.dtype) for plane in cache.spec(0).planes} else np.nan)


def rows(name: str, count: int, seed: int = 0) -> Any:
    spec = SPECS[name]
    new = np.random.default_rng(seed).standard_normal((count, spec.row_dim)).astype(BF16)
    return new[:, : spec.latent_dim], new[:, spec.latent_dim :]


def step(cuda: Kit, cache: PagedKVCache, sequences: Any, counts: Any, parts: Any, stream: Any = None) -> Any:
    """Write the next tokens of sequences to both layers; the second layer stores twice the numbers of the first."""
    batch = cache.prepare(sequences, counts, stream=stream)
    for layer in range(2):
        given = [cuda.put((part.astype(np.float32) * (layer + 1)).astype(BF16)) for part in parts]
        cache.write(layer, *given, batch, stream=stream)
    cache.commit(batch)
    return batch


def stored(name: str, parts: Any) -> Any:
    """Return the numbers that a host cache of the same spec reads back."""
    spec, count = SPECS[name], len(parts[0])
    planes = [np.zeros((count + 1, 1, *plane.shape), plane.dtype.numpy) for plane in spec.planes]
    arguments = [*planes, None][:2]
    write_latent(*parts, *arguments, np.arange(1, count + 1), scale=spec.key_scale)
    table = np.arange(1, count + 1)[None]
    return gather_latent(*arguments, table, [count], latent_scale=spec.key_scale)


def read(cuda: Kit, cache: PagedKVCache, sequence: Any, layer: int = 0) -> Any:
    """Gather the computed tokens of a sequence on the device, by the host's table, which knows of swaps."""
    spec = cache.spec(layer)
    planes = [cache.plane(plane.name, layer) for plane in spec.planes]
    got = gather_latent(
        *[*planes, None][:2],
        cache._parts.tables.table(cache.group_of(layer)),
        [sequence.num_computed_tokens],
        rows=[sequence.row],
        latent_scale=spec.key_scale,
    )
    return cuda.get(got)


def check(cuda: Kit, cache: PagedKVCache, name: str, sequence: Any, parts: Any) -> None:
    """Compare what both layers hold of a sequence; with a window, its last tokens."""
    cuda.runtime.synchronize(0)
    window = SPECS[name].window
    for layer in range(2):
        scaled = [(part.astype(np.float32) * (layer + 1)).astype(BF16) for part in parts]
        expected, got = stored(name, scaled), read(cuda, cache, sequence, layer)
        first = 0 if window is None else max(0, len(expected) - window + 1)
        assert got[first:].tolist() == expected[first:].tolist()


@EVERY_SPEC
@pytest.mark.parametrize("layout", ["layerwise", "BNHD"])
def test_steps_are_stored_as_on_the_host(cuda, name, layout):
    if layout == "BNHD" and name == "apart":
        layout = "LBNCHD"
    cache = make(cuda, name, layout=layout)
    sequences = [cache.add_sequence(range(n)) for n in (9, 2)]
    parts = rows(name, 11)
    batch = step(cuda, cache, sequences, [9, 2], parts)
    cache.append_tokens(sequences, [[1], [2, 3]])
    more = rows(name, 3, seed=1)
    batch = step(cuda, cache, sequences, [1, 2], more)
    for sequence, old, new in zip(sequences, (slice(0, 9), slice(9, 11)), (slice(0, 1), slice(1, 3)), strict=True):
        whole = [np.concatenate([a[old], b[new]]) for a, b in zip(parts, more, strict=True)]
        check(cuda, cache, name, sequence, whole)
    assert_device_tables(cuda, cache, batch)
    cache.check_invariants()


@EVERY_SPEC
def test_forks_copy_on_write_and_swap_keep_latents(cuda, name):
    cache = make(cuda, name)
    space = SwapSpace(cache, num_blocks=9)
    parent, parts = cache.add_sequence(range(6)), rows(name, 6)
    step(cuda, cache, [parent], [6], parts)
    child = cache.fork(parent)
    both = {}
    for seed, sequence in enumerate((child, parent), 1):
        cache.append_tokens([sequence], [[7, 8, 9]])
        new = rows(name, 3, seed)
        step(cuda, cache, [sequence], [3], new)
        both[sequence] = [np.concatenate(pair) for pair in zip(parts, new, strict=True)]
    for sequence, whole in both.items():
        check(cuda, cache, name, sequence, whole)
    before = block_bytes(cuda, cache, parent)
    cache.swap_out([parent], space)
    cuda.runtime.synchronize(0)
    spoil(cuda, cache)
    cache.swap_in([parent])
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, parent) == before
    for sequence, whole in both.items():
        check(cuda, cache, name, sequence, whole)
    cache.check_invariants()


@EVERY_SPEC
def test_a_cached_prefix_is_reused(cuda, name):
    cache = make(cuda, name)
    first, parts = cache.add_sequence(range(9)), rows(name, 9)
    step(cuda, cache, [first], [9], parts)
    cache.remove(first)
    second = cache.add_sequence(range(11))
    assert second.num_cached_tokens == 8
    new = rows(name, 3, seed=1)
    step(cuda, cache, [second], [3], new)
    check(cuda, cache, name, second, [np.concatenate([a[:8], b]) for a, b in zip(parts, new, strict=True)])


def test_writes_run_on_the_stream_of_the_step(cuda):
    cache, stream = make(cuda, "fp8_ds_mla", prefix_cache=False), cuda.stream()
    sequence, parts = cache.add_sequence(range(7)), rows("fp8_ds_mla", 7)
    kept = step(cuda, cache, [sequence], [7], parts, stream)
    cuda.runtime.synchronize(stream)
    check(cuda, cache, "fp8_ds_mla", sequence, parts)
    del kept


def test_gathered_rows_are_attended_to(cuda):
    """The gathered rows are blocks of a cache of one head, whose values are the first numbers of its keys."""
    spec, cache = SPECS["joint"], make(cuda, "joint")
    sequence, parts = cache.add_sequence(range(8)), rows("joint", 8)
    step(cuda, cache, [sequence], [8], parts)
    kept = cuda.empty((3, 4, 1, spec.row_dim), "bfloat16")
    out = strided(kept, (8, spec.row_dim), (2 * spec.row_dim, 2), 8 * spec.row_dim, "bfloat16")
    table = cache.block_table(0)
    gather_latent(cache.plane("latent", 0), None, table, [8], rows=[sequence.row], out=out)
    values = strided(kept, (3, 4, 1, spec.latent_dim), kept.strides, 0, "bfloat16")
    query = np.random.default_rng(5).standard_normal((1, HEADS, spec.row_dim)).astype(np.float32)
    got = cuda.get(paged_attention(cuda.put(query), kept, values, [[1, 2]], [8], scale=SCALE))
    keys = stored("joint", parts)[:, None]
    expected = dense_attention(query, keys, keys[..., : spec.latent_dim], scale=SCALE)
    np.testing.assert_allclose(got, expected, atol=2e-3)


@EVERY_SPEC
def test_attention_to_a_cache_equals_dense_attention(cuda, name):
    """A prompt, then decoding; the reference attends to the numbers that the rows hold."""
    spec, cache = SPECS[name], make(cuda, name)
    sequences = [cache.add_sequence(range(9)), cache.add_sequence(range(50, 53))]
    parts, more = rows(name, 12), rows(name, 2, seed=1)
    query = np.random.default_rng(1).standard_normal((14, HEADS, spec.row_dim)).astype(BF16)
    outputs = []
    for counts, new, asked in (([9, 3], parts, query[:12]), ([1, 1], more, query[12:])):
        if outputs:
            cache.append_tokens(sequences, [[1], [2]])
        batch = cache.prepare(sequences, counts)
        assert batch.group(0).plan is not None
        cache.write(0, *[cuda.put(part) for part in new], batch)
        both = [asked[..., : spec.latent_dim], asked[..., spec.latent_dim :]]
        outputs.append(cuda.get(cache.attend(0, tuple(cuda.put(part.copy()) for part in both), batch)))
        cache.commit(batch)
    got = np.concatenate(outputs).astype(np.float32)
    for tokens in ([*range(9), 12], [*range(9, 12), 13]):
        latents = [np.concatenate([a, b])[tokens] for a, b in zip(parts, more, strict=True)]
        keys = stored(name, latents)[:, None]
        expected = dense_attention(
            query[tokens].astype(np.float32), keys, keys[..., : spec.latent_dim], scale=SCALE, window=spec.window
        )
        np.testing.assert_allclose(got[tokens], expected, atol=3e-2)


def test_an_indexer_selects_slots_of_a_cache(cuda):
    spec = LatentSpec(40, 16, HEADS, scale=SCALE, index_dim=128)
    cache = PagedKVCache(spec, block_size=4, num_blocks=24, device=cuda.device)
    poison(cuda, cache)
    rng = np.random.default_rng(0)
    sequence = cache.add_sequence(range(20))
    batch = cache.prepare([sequence], 20)
    keys, query = rng.standard_normal((20, 128)).astype(BF16), rng.standard_normal((20, 64, 128)).astype(BF16)
    weights = rng.uniform(size=(20, 64)).astype(np.float32)
    planes, group = [cache.plane(name, 0) for name in ("index_key", "index_scale")], batch.group(0)
    write_index(cuda.put(keys), *planes, group.slot_mapping)
    lists = {"rows": batch.rows, "cu_query_lens": batch.cu_query_lens}
    out = cuda.empty((20, 24))
    index_scores(cuda.put(query), cuda.put(weights), *planes, group.block_table, batch.seq_lens, out=out, **lists)
    scores = cuda.get(out)
    host = [np.zeros((20, 1, 128), ml_dtypes.float8_e4m3fn), np.zeros((20, 1, 1), np.float32)]
    write_index(keys, *host, np.arange(20))
    expected = index_scores(query, weights, *host, np.arange(20)[None], [20], cu_query_lens=[0, 20])
    np.testing.assert_allclose(scores[:, :20], expected, rtol=1e-4, atol=1e-3)
    assert np.isneginf(scores[:, 20:]).all()
    positions = np.where(np.isneginf(expected), -1, np.arange(20)).astype(np.int32)
    slots = cuda.get(slots_of(cuda.put(positions), group.block_table, 4, **lists))
    table = cache._parts.tables.blocks(sequence.row)
    assert slots[19].tolist() == [int(table[i // 4] * 4 + i % 4) for i in range(20)]
    assert (slots[3, 4:] == -1).all()
    cache.commit(batch)
