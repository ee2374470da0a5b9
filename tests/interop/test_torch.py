"""torch operators in eager mode: opcheck, parity with pagecore's own functions, and planes as tensors."""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache, ops
from pagecore.arrays import as_tensor
from pagecore.errors import UnsupportedDtype, UnsupportedOption
from tests.interop.steps import BLOCK, DIM, DTYPES, HEADS, KV_HEADS, WITHOUT_TRACE, make_step, torch
from tests.thinning import in_turn

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

LAYOUTS = pytest.mark.parametrize("layout", [None, "layerwise", "blockwise"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
PLANES = [*((dtype, None) for dtype in DTYPES), ("bfloat16", "layerwise"), ("bfloat16", "blockwise")]
HEAD_NUMBERS = torch.tensor([0.5, 2.0])
OPTIONS = {
    "default": {},
    "scale": {"scale": 0.3, "softcap": 5.0},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "sink tokens": {"window": 3, "sink_tokens": 2},
    "sides": {"window": (2, None), "causal": False},
    "sinks": {"sinks": torch.tensor([0.1, -1.0, 2.0, 0.0]), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "mask": {"mask": torch.arange(5 * 5 + 1 + 9) % 3 != 1},
    "tree": {"tree_mask": torch.tensor([1, 3, 5, 9, 19, 1, 1])},
    "scales": {"key_scale": 0.5, "value_scale": HEAD_NUMBERS},
    "scales of a layer": {"key_scale": torch.tensor(0.5), "value_scale": torch.tensor([2.0])},
    "rows": {"rows": torch.tensor([2, 1, 0])},
}


# ---- torch.library.opcheck


def opcheck(operator, dtype, arguments, options=()):
    """Check an operator; dtypes do not change how it is traced, so that one of them is enough."""
    torch.library.opcheck(operator, arguments, dict(options), **({} if dtype == "bfloat16" else WITHOUT_TRACE))


SCALES = [{}, {"key_scale": HEAD_NUMBERS, "value_scale": HEAD_NUMBERS}]


@pytest.mark.parametrize(("planes", "scales"), in_turn(PLANES, over=[SCALES]))
def test_write_kv_passes_opcheck(planes, scales):
    opcheck(torch.ops.pagecore.write_kv.default, planes[0], make_step(*planes).written, scales)


VARIANTS = ["paged_attention", "paged_attention_lse", "paged_attention_out"]


@pytest.mark.parametrize(("planes", "name"), [*in_turn(PLANES, over=[VARIANTS]), (PLANES[-1], VARIANTS[-1])])
def test_paged_attention_passes_opcheck(planes, name):
    step = make_step(*planes)
    options = {"cu_query_lens": step.cu_query_lens, "window_left": 4, "sinks": torch.zeros(HEADS)}
    out = [torch.empty_like(step.query)] if name == "paged_attention_out" else []
    opcheck(getattr(torch.ops.pagecore, name).default, planes[0], (*step.attended, *out), options)


@EVERY_DTYPE
def test_merge_attention_passes_opcheck(dtype):
    outs = torch.randn(2, 5, HEADS, DIM).to(getattr(torch, dtype))
    lses = torch.randn(2, 5, HEADS)
    given = (outs[0], lses[0], outs[1], lses[1])
    opcheck(torch.ops.pagecore.merge_attention.default, dtype, given, {"mask": torch.arange(5) % 2 == 0})


@EVERY_DTYPE
def test_hadamard_passes_opcheck(dtype):
    rows = torch.randn(5, HEADS, 96).to(getattr(torch, dtype))
    for x in (rows, rows[:, ::2], rows[0, 0]):
        opcheck(torch.ops.pagecore.hadamard.default, dtype, (x,))


@EVERY_DTYPE
def test_hadamard_equals_pagecore_hadamard_and_is_compiled(dtype):
    rows = torch.randn(5, HEADS, 96).to(getattr(torch, dtype))
    expected = ops.hadamard(rows)
    assert torch.equal(interop.hadamard(rows), expected)
    assert torch.equal(torch.compile(interop.hadamard, fullgraph=True, backend="aot_eager")(rows), expected)


@EVERY_DTYPE
def test_merge_attention_parts_passes_opcheck(dtype):
    outs = torch.randn(5, 3, HEADS, DIM).to(getattr(torch, dtype))
    lses = torch.randn(5, 3, HEADS)
    ragged = (outs.flatten(0, 1), lses.flatten(0, 1), torch.tensor([0, 2, 2, 15]))
    for given in ((outs, lses), ragged):
        opcheck(torch.ops.pagecore.merge_attention_parts.default, dtype, given)


@pytest.mark.parametrize(("planes", "options"), in_turn(PLANES, over=[[{}, {"independent": True}]]))
def test_copy_blocks_passes_opcheck(planes, options):
    step = make_step(*planes)
    pairs = torch.tensor([[1, 4], [2, 5]])
    opcheck(torch.ops.pagecore.copy_blocks.default, planes[0], ([step.key_cache, step.value_cache], pairs), options)


# ---- parity with pagecore's own functions


@LAYOUTS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_equals_pagecore_paged_attention(options, layout):
    step = make_step(layout=layout)
    options = {"cu_query_lens": step.cu_query_lens} | options
    expected, expected_lse = ops.paged_attention(*step.attended, **options, return_lse=True)
    out, lse = interop.paged_attention(*step.attended, **options, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(interop.paged_attention(*step.attended, **options), expected)
    into = torch.full_like(step.query, torch.nan)
    assert interop.paged_attention(*step.attended, **options, out=into) is into
    assert torch.equal(into, expected)


@LAYOUTS
@pytest.mark.parametrize(
    "options", [{}, OPTIONS["scales"], OPTIONS["scales of a layer"]], ids=["plain", "heads", "layer"]
)
def test_writes_and_copies_mutate_the_caches_in_place(options, layout):
    step, twin = make_step(layout=layout), make_step(layout=layout)
    interop.write_kv(*step.written, **options)
    ops.write_kv(*twin.written, **options)
    for cache, expected in ((step.key_cache, twin.key_cache), (step.value_cache, twin.value_cache)):
        assert torch.equal(cache, expected)
    pairs = torch.tensor([[3, 8], [1, 4]])
    interop.copy_blocks([step.key_cache, step.value_cache], pairs)
    interop.copy_blocks(step.key_cache, torch.tensor([[8, 7]]), independent=True)
    assert torch.equal(step.key_cache[[8, 7, 4]], twin.key_cache[[3, 3, 1]])
    assert torch.equal(step.value_cache[[8, 4]], twin.value_cache[[3, 1]])


def test_a_false_claim_of_independent_pairs_is_refused():
    step = make_step()
    with pytest.raises(UnsupportedOption, match="pair 1 reads block 4, which pair 0 writes"):
        interop.copy_blocks(step.key_cache, torch.tensor([[1, 4], [4, 5]]), independent=True)


def test_merging_two_halves_equals_attention_over_all_keys():
    step = make_step()
    whole, whole_lse = interop.paged_attention(
        *step.attended, cu_query_lens=step.cu_query_lens, causal=False, return_lse=True
    )
    halves = [torch.arange(35) % 2 == parity for parity in (0, 1)]
    parts = [
        interop.paged_attention(
            *step.attended, cu_query_lens=step.cu_query_lens, causal=False, mask=half, return_lse=True
        )
        for half in halves
    ]
    merged, lse = interop.merge_attention(*parts[0], *parts[1])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)
    stacked = [torch.stack(arrays, 1) for arrays in zip(*parts, strict=True)]
    ragged = [each.flatten(0, 1) for each in stacked]
    for given in (stacked, (*ragged, torch.arange(len(whole) + 1, dtype=torch.int32) * 2)):
        for got, expected in zip(interop.merge_attention_parts(*given), (merged, lse), strict=True):
            assert torch.equal(got, expected)
    first, second = parts
    kept, _ = interop.merge_attention(*first, *second, mask=torch.zeros(len(whole), dtype=torch.bool))
    assert torch.equal(kept, first[0])


def test_a_whole_cache_can_be_driven_by_operators():
    """The tensors alias tables, lengths and slots of the batch, so one set of tensors serves every step."""
    spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
    cache = PagedKVCache(spec, num_layers=2, num_blocks=17, block_size=BLOCK, max_sequences=3)
    batch = cache.make_batch(max_sequences=3, max_tokens=12)
    rows, lens, starts = (interop.as_torch(a) for a in (batch.rows, batch.seq_lens, batch.cu_query_lens))
    slots = interop.as_torch(batch.group(0).slot_mapping)
    table = interop.as_torch(cache.block_table(0), read_only=True)
    sequences = [cache.add_sequence(range(7)), cache.add_sequence(range(20, 25))]
    for counts in ([7, 5], [1, 1], [1, 1]):
        cache.prepare(sequences, counts, out=batch)
        key, value, query = (torch.randn(12, heads, DIM) for heads in (KV_HEADS, KV_HEADS, HEADS))
        for layer in range(2):
            planes = interop.as_torch(cache.key(layer)), interop.as_torch(cache.value(layer))
            interop.write_kv(key, value, *planes, slots)
            out = interop.paged_attention(query, *planes, table, lens, rows=rows, cu_query_lens=starts)
            assert torch.equal(out, cache.attend(layer, query, batch))
        cache.commit(batch)
        cache.append_tokens(sequences, [1, 2])


# ---- planes and tables as torch tensors


@pytest.mark.parametrize("dtype", pagecore.arrays.dtypes.dtype.DTYPES)
def test_as_torch_aliases_tensors_of_every_dtype(dtype):
    tensor = pagecore.zeros((3, 4), dtype)
    view = interop.as_torch(tensor)
    assert (view.data_ptr(), str(view.dtype)) == (tensor.pointer, f"torch.{dtype}")
    view[1, 2] = 1
    assert tensor.tolist()[1][2] == 1


@pytest.mark.parametrize("layout", ["layerwise", "blockwise"])
@EVERY_DTYPE
def test_as_torch_aliases_the_planes_of_a_pool(dtype, layout):
    spec = AttentionSpec(KV_HEADS, DIM, dtype=dtype)
    cache = PagedKVCache(spec, num_layers=2, num_blocks=5, block_size=BLOCK, layout=layout)
    for plane in (cache.key(1), cache.value(1)):
        view = interop.as_torch(plane)
        assert (view.data_ptr(), tuple(view.shape)) == (plane.pointer, plane.shape)
        assert [stride * view.itemsize for stride in view.stride()] == list(plane.strides)
        view.fill_(2)
        assert (plane.numpy() == 2).all()


def test_a_plane_and_its_torch_tensor_outlive_each_other():
    cache = PagedKVCache(AttentionSpec(KV_HEADS, DIM, dtype="bfloat16"), num_blocks=5)
    view = interop.as_torch(cache.key(0)).fill_(3)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert view.float().sum() == 3 * view.numel()
    cache = PagedKVCache(AttentionSpec(KV_HEADS, DIM, dtype="bfloat16"), num_blocks=5)
    interop.as_torch(cache.key(0)).fill_(4)
    gc.collect()
    assert (cache.key(0).numpy() == 4).all()


def test_memory_is_freed_with_its_last_owner():
    array = np.ones((4, 8), np.float32)
    held = weakref.ref(array)
    view = interop.as_torch(as_tensor(array)[1:])
    del array
    assert held() is not None
    del view
    gc.collect()
    assert held() is None


def test_read_only_memory_needs_read_only_true():
    cache = PagedKVCache(AttentionSpec(KV_HEADS, DIM, dtype="float32"), num_blocks=5, max_sequences=2)
    table = cache.block_table(0)
    with pytest.raises(UnsupportedOption, match="read_only=True"):
        interop.as_torch(table)
    view = interop.as_torch(table, read_only=True)
    assert view.data_ptr() == table.pointer
    sequence = cache.add_sequence(range(3))
    cache.prepare([sequence], 3)
    assert view[sequence.row].tolist() == np.asarray(table)[sequence.row].tolist() != [0] * view.shape[1]


def test_as_torch_raises_for_negative_strides_and_for_other_types():
    with pytest.raises(UnsupportedOption, match="negative"):
        interop.as_torch(as_tensor(np.zeros(4, np.float32))[::-1])
    for other in (np.zeros(4, np.float32), torch.zeros(2), None):
        with pytest.raises(UnsupportedDtype, match=re.escape("pagecore.as_tensor")):
            interop.as_torch(other)


def test_torch_tensors_are_read_through_the_c_exchange_api(monkeypatch):
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    step = make_step("bfloat16")
    interop.write_kv(*step.written)
    assert interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens).shape == (7, HEADS, DIM)
