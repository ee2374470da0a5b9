"""torch operators in eager mode: opcheck, parity with pagecore's own functions, errors, and planes as tensors."""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache, ops
from pagecore.arrays import as_tensor
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.steps import BLOCK, DIM, DTYPES, HEADS, KV_HEADS, make_step, torch

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

LAYOUTS = pytest.mark.parametrize("layout", [None, "layerwise", "blockwise"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
PLANES = pytest.mark.parametrize(
    ("dtype", "layout"),
    [*((dtype, None) for dtype in DTYPES), ("bfloat16", "layerwise"), ("bfloat16", "blockwise")],
)
HEAD_NUMBERS = torch.tensor([0.5, 2.0])
OPTIONS = {
    "default": {},
    "scale": {"scale": 0.3, "softcap": 5.0},
    "window": {"window": 3},
    "sides": {"window": (2, None), "causal": False},
    "sinks": {"sinks": torch.tensor([0.1, -1.0, 2.0, 0.0]), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "mask": {"mask": torch.arange(5 * 5 + 1 + 9) % 3 != 1},
    "scales": {"key_scale": 0.5, "value_scale": HEAD_NUMBERS},
    "rows": {"rows": torch.tensor([2, 1, 0])},
}


# ---- torch.library.opcheck


@PLANES
def test_write_kv_passes_opcheck(dtype, layout):
    operator = torch.ops.pagecore.write_kv.default
    torch.library.opcheck(operator, make_step(dtype, layout).written)
    scales = {"key_scale": HEAD_NUMBERS, "value_scale": HEAD_NUMBERS}
    torch.library.opcheck(operator, make_step(dtype, layout).written, scales)


@PLANES
def test_paged_attention_passes_opcheck(dtype, layout):
    step = make_step(dtype, layout)
    options = {"cu_query_lens": step.cu_query_lens, "window_left": 4, "sinks": torch.zeros(HEADS)}
    for name in ("paged_attention", "paged_attention_lse"):
        torch.library.opcheck(getattr(torch.ops.pagecore, name).default, step.attended, options)
    out = torch.empty_like(step.query)
    torch.library.opcheck(torch.ops.pagecore.paged_attention_out.default, (*step.attended, out), options)


@EVERY_DTYPE
def test_merge_attention_passes_opcheck(dtype):
    outs = torch.randn(2, 5, HEADS, DIM).to(getattr(torch, dtype))
    lses = torch.randn(2, 5, HEADS)
    torch.library.opcheck(torch.ops.pagecore.merge_attention.default, (outs[0], lses[0], outs[1], lses[1]))


@PLANES
def test_copy_blocks_passes_opcheck(dtype, layout):
    step = make_step(dtype, layout)
    caches = [step.key_cache, step.value_cache]
    operator, pairs = torch.ops.pagecore.copy_blocks.default, torch.tensor([[1, 4], [2, 5]])
    torch.library.opcheck(operator, (caches, pairs))
    torch.library.opcheck(operator, (caches, pairs), {"independent": True})


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
@pytest.mark.parametrize("options", [{}, {"key_scale": 0.5, "value_scale": HEAD_NUMBERS}], ids=["plain", "scales"])
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


# ---- errors


def test_arrays_that_require_grad_raise_and_the_message_suggests_detach():
    step = make_step()
    for name in ("query", "key_cache"):
        given = dict(zip(("query", "key_cache", "value_cache", "block_table", "seq_lens"), step.attended, strict=True))
        given[name] = given[name].detach().requires_grad_()
        with pytest.raises(UnsupportedOption, match=rf"{name}.*grad.*detach"):
            interop.paged_attention(**given, cu_query_lens=step.cu_query_lens)
    with pytest.raises(UnsupportedOption, match=r"key: .*grad.*detach"):
        interop.write_kv(step.key.requires_grad_(), *step.written[1:])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch in forward mode
def test_torch_func_and_forward_mode_raise_instead_of_treating_operators_as_constants():
    step = make_step()

    def attend(query):
        return interop.paged_attention(query, *step.attended[1:], cu_query_lens=step.cu_query_lens).sum()

    def write(key):
        cache = step.key_cache.clone()
        interop.write_kv(key, step.value, cache, step.value_cache, step.slot_mapping)
        return cache.sum()

    for differentiate in (
        lambda: torch.func.grad(attend)(step.query),
        lambda: torch.func.jvp(attend, (step.query,), (step.query,)),
        lambda: torch.func.grad(write)(step.key),
        lambda: torch.vmap(torch.func.grad(attend))(torch.stack([step.query] * 2)),
    ):
        with pytest.raises(UnsupportedOption, match=r"no gradient; call the operator outside"):
            differentiate()
    numbers = {"sinks": torch.zeros(HEADS), "alibi_slopes": torch.zeros(HEADS)}
    numbers |= {"key_scale": HEAD_NUMBERS, "value_scale": HEAD_NUMBERS}
    for name, tensor in numbers.items():

        def attend_with(tensor, name=name):
            return interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens, **{name: tensor}).sum()

        with pytest.raises(UnsupportedOption, match=r"no gradient; call the operator outside"):
            torch.func.grad(attend_with)(tensor)
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(UnsupportedOption, match=r"no gradient; call the operator outside"),
        ):
            attend_with(torch.autograd.forward_ad.make_dual(tensor, tensor))

    def scaled_write(scale):
        cache = step.key_cache.clone()
        interop.write_kv(step.key, step.value, cache, step.value_cache, step.slot_mapping, key_scale=scale)
        return cache.sum()

    def attend_into(out):
        return interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens, out=out).sum()

    for function, tensor in ((scaled_write, HEAD_NUMBERS), (attend_into, torch.empty_like(step.query))):
        with pytest.raises(UnsupportedOption, match=r"no gradient; call the operator outside"):
            torch.func.grad(function)(tensor)
    with torch.autograd.forward_ad.dual_level():
        attend(step.query)
        with pytest.raises(UnsupportedOption, match=r"no gradient; call the operator outside"):
            attend(torch.autograd.forward_ad.make_dual(step.query, step.query))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"key": lambda a: a.int()}, UnsupportedDtype, "key is int32.*convert"),
        ({"key": lambda a: a.transpose(1, 2).contiguous().transpose(1, 2)}, ShapeError, "key has.*last axis.*copy"),
        ({"value_cache": lambda a: a.transpose(2, 3)}, ShapeError, "value_cache"),
        ({"key": lambda a: a[:, :1]}, ShapeError, "axis 1 must have length 2: the heads of key_cache"),
        ({"slot_mapping": lambda a: a + 100}, pagecore.InvalidBlock, "slot"),
        ({"slot_mapping": lambda a: a.float()}, UnsupportedDtype, "slot_mapping holds float32"),
        ({"value": lambda a: a.to("meta")}, DeviceError, "value is on meta and key on cpu"),
    ],
)
def test_invalid_arguments_raise_by_name_and_write_nothing(change, error, says):
    step = make_step()
    for name, make in change.items():
        setattr(step, name, make(getattr(step, name)))
    before = make_step()
    with pytest.raises(error, match=says):
        interop.write_kv(*step.written)
    assert torch.equal(step.key_cache, before.key_cache)


def test_arrays_of_other_types_raise_and_the_message_says_what_to_pass():
    step = make_step()
    calls = {
        "key is a numpy.ndarray.*torch.as_tensor": lambda: interop.write_kv(step.key.numpy(), *step.written[1:]),
        "slot_mapping is a list.*torch.as_tensor": lambda: interop.write_kv(*step.written[:4], [12, 13]),
        "key_cache is a pagecore.*Tensor.*as_torch": lambda: interop.paged_attention(
            step.query, pagecore.as_tensor(step.key_cache), *step.attended[2:]
        ),
        "lse_a is a tuple": lambda: interop.merge_attention(step.query, (), step.query, ()),
        "caches is a numpy.ndarray": lambda: interop.copy_blocks([step.key_cache.numpy()], torch.tensor([[1, 2]])),
        "pairs is a list": lambda: interop.copy_blocks(step.key_cache, [[1, 2]]),
    }
    for says, call in calls.items():
        with pytest.raises(UnsupportedDtype, match=says):
            call()


OWN = pagecore.zeros((35,), "bool")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rows": np.arange(3)}, UnsupportedDtype, r"rows is a numpy.ndarray; .* torch.as_tensor\(array\)"),
        ({"cu_query_lens": [0, 5, 6, 7]}, UnsupportedDtype, "cu_query_lens is a list"),
        ({"sinks": np.zeros(4)}, UnsupportedDtype, "sinks is a numpy.ndarray"),
        ({"mask": OWN}, UnsupportedDtype, r"mask is a pagecore.*Tensor; .* as_torch\(tensor\)"),
        ({"out": np.zeros((7, HEADS, DIM))}, UnsupportedDtype, "out is a numpy.ndarray; .* torch.as_tensor"),
        ({"key_scale": np.ones(2)}, UnsupportedDtype, "key_scale is a numpy.ndarray"),
        ({"value_scale": "a"}, UnsupportedDtype, "value_scale is a str"),
        ({"window": "a"}, UnsupportedOption, r"window is 'a'; it must be a number of keys, or \(left, right\)"),
        ({"window": 2.5}, UnsupportedOption, "window is 2.5; it must be a number of keys"),
        ({"window": (1, "a")}, UnsupportedOption, r"window is \(1, 'a'\)"),
        ({"scale": "a"}, UnsupportedOption, "scale is 'a'; it must be a number"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, UnsupportedOption, r"requires grad.* pass scale.item\(\)"),
        ({"softcap": None}, UnsupportedOption, "softcap is None; it must be a number"),
        ({"causal": "a"}, UnsupportedOption, "causal is 'a'; it must be True or False"),
    ],
    ids=str,
)
def test_options_of_other_types_raise_by_name(options, error, says):
    step = make_step()
    with pytest.raises(error, match=says):
        interop.paged_attention(*step.attended, **{"cu_query_lens": step.cu_query_lens} | options)


def test_scales_are_checked_before_they_are_expanded_per_head():
    step = make_step()
    for scale in (np.ones(2), "a"):
        with pytest.raises(UnsupportedDtype, match="key_scale is a"):
            interop.write_kv(*step.written, key_scale=scale)
    flat = step.key_cache.flatten(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache has shape \(9, 128\); it must have 4 axes"):
        interop.write_kv(*step.written[:2], flat, *step.written[3:], key_scale=0.5)
    with pytest.raises(ShapeError, match="key_cache has shape"):
        interop.paged_attention(step.query, flat, *step.attended[2:], value_scale=0.5)
    with pytest.raises(UnsupportedDtype, match=r"key_cache is a numpy\.ndarray"):
        interop.write_kv(*step.written[:2], step.key_cache.numpy(), *step.written[3:], key_scale=0.5)


def test_numpy_and_torch_scalars_are_accepted_as_numbers():
    step = make_step()
    where = {"cu_query_lens": step.cu_query_lens}
    expected = interop.paged_attention(*step.attended, scale=0.5, causal=False, window=(2, 0), key_scale=0.5, **where)
    for number in (np.float32(0.5), torch.tensor(0.5)):
        options = {"scale": number, "causal": np.False_, "window": (np.int64(2), 0), "key_scale": number}
        assert torch.equal(interop.paged_attention(*step.attended, **where, **options), expected)


def test_meta_indices_with_host_arrays_raise():
    step = make_step()
    nowhere = step.seq_lens.to("meta")
    for call in (
        lambda: interop.paged_attention(*step.attended[:4], nowhere, cu_query_lens=step.cu_query_lens),
        lambda: interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens.to("meta")),
        lambda: interop.paged_attention(*step.attended[:4], nowhere, out=torch.empty_like(step.query)),
        lambda: interop.write_kv(*step.written[:4], step.slot_mapping.to("meta")),
        lambda: interop.copy_blocks(step.key_cache, torch.zeros(1, 2, dtype=torch.int32, device="meta")),
    ):
        with pytest.raises(DeviceError, match="on meta and the others on cpu"):
            call()


def test_options_that_the_operators_do_not_support_raise():
    step = make_step()
    out = torch.empty_like(step.query)
    for options, says in (
        (
            {"plan": ops.AttentionPlan(num_query_heads=4, num_kv_heads=2)},
            "plan is an AttentionPlan.*plan_attention",
        ),
        ({"stream": 0}, "stream is not an option"),
        ({"out": out, "return_lse": True}, "leave one out"),
        ({"window": 0}, "window is 0"),
        ({"window": (1, 2, 3)}, "window is"),
        ({"softcap": -1.0}, "softcap"),
    ):
        with pytest.raises(UnsupportedOption, match=says):
            interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens, **options)
    with pytest.raises(UnsupportedDtype, match="out is float16"):
        interop.paged_attention(*step.attended, cu_query_lens=step.cu_query_lens, out=out.half())


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_fake_implementations_give_shapes_and_dtypes():
    cache, wide = meta(9, 4, 2, 16), meta(9, 4, 2, 32)
    query, table, lens = meta(7, 4, 16), meta(3, 3, dtype=torch.int32), meta(3, dtype=torch.int32)
    out, lse = interop.paged_attention(query, cache, wide, table, lens, return_lse=True)
    assert (tuple(out.shape), out.dtype) == ((7, 4, 32), torch.bfloat16)
    assert (tuple(lse.shape), lse.dtype) == ((7, 4), torch.float32)
    strided = meta(4, 7, 16).transpose(0, 1)
    assert interop.paged_attention(strided, cache, wide, table, lens).is_contiguous()
    assert interop.paged_attention(query, cache, cache, table, lens, out=query) is query
    merged, _ = interop.merge_attention(strided, lse[:, :4], strided, lse)
    assert merged.is_contiguous()
    assert interop.write_kv(query[:, :2], wide[0, 0, 0].expand(7, 2, 32), cache, wide, lens) is None
    assert interop.copy_blocks([cache, wide], table) is None


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ShapeError, "query has shape", lambda q, c, i: interop.paged_attention(q[0], c, c, i, i)),
        (ShapeError, "value_cache has shape", lambda q, c, i: interop.paged_attention(q, c, c[0], i, i)),
        (UnsupportedDtype, "key_cache is", lambda q, c, i: interop.paged_attention(q, c.int(), c, i, i)),
        (UnsupportedDtype, "out is", lambda q, c, i: interop.paged_attention(q, c, c, i, i, out=q.float())),
        (
            UnsupportedOption,
            r"key requires grad.* pass key.detach\(\), or compute it under torch.no_grad\(\)",
            lambda q, c, i: interop.write_kv(q.detach().requires_grad_(), q, c, c, i),
        ),
        (ShapeError, "key has shape", lambda q, c, i: interop.write_kv(q[0], q, c, c, i)),
        (DeviceError, "is on", lambda q, c, i: interop.write_kv(q, q, torch.zeros(9, 4, 2, 16), c, i)),
        (ShapeError, "lse_a has", lambda q, c, i: interop.merge_attention(q, q, q, q)),
    ],
)
def test_fake_implementations_raise_for_invalid_arguments(error, says, call):
    with pytest.raises(error, match=says):
        call(meta(7, 2, 16), meta(9, 4, 2, 16), meta(3, dtype=torch.int32))


# ---- planes and tables as torch tensors


@pytest.mark.parametrize("dtype", pagecore.arrays.dtypes.DTYPES)
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
