"""Errors of the torch operators in eager mode and of their fake implementations."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore import ops
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.steps import DIM, HEADS, make_step, torch

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

HEAD_NUMBERS = torch.tensor([0.5, 2.0])


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
        "mask is a list": lambda: interop.merge_attention(step.query, step.query, step.query, step.query, mask=[True]),
        "x is a list": lambda: interop.hadamard([]),
        "outs is a list": lambda: interop.merge_attention_parts([], step.query),
        "cu_parts is a list": lambda: interop.merge_attention_parts(step.query, step.query, [0, 1]),
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
        ({"scale": True}, UnsupportedOption, "scale is True; it must be a number"),
        ({"softcap": np.True_}, UnsupportedOption, "softcap is .*True.*; it must be a number"),
        ({"key_scale": True}, UnsupportedOption, "key_scale is True; it must be a number, or a tensor of one"),
        (
            {"key_scale": torch.tensor(True)},
            UnsupportedOption,
            "key_scale is .*True.*; it must be a number, or a tensor",
        ),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, UnsupportedOption, r"requires grad.* pass scale.item\(\)"),
        ({"softcap": None}, UnsupportedOption, "softcap is None; it must be a number"),
        ({"causal": "a"}, UnsupportedOption, "causal is 'a'; it must be True or False"),
        ({"causal": 2}, UnsupportedOption, "causal is 2; it must be True or False"),
        ({"window": True}, UnsupportedOption, "window is True; it must be a number of keys"),
        ({"window": (True, 0)}, UnsupportedOption, r"window is \(True, 0\); it must be a number of keys"),
        ({"chunk": True}, UnsupportedOption, "chunk is True; it counts keys"),
        ({"sink_tokens": True, "window": 3}, UnsupportedOption, "sink_tokens is True; it counts keys"),
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


@pytest.mark.parametrize("name", ["priority", "rank"])
@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor([False])])
def test_tensors_of_bool_are_no_numbers_of_a_prefix_tree(name, value):
    tree = pagecore.RadixTree(2, policy=name)
    for options in ({name: value}, {"time": value}):
        with pytest.raises(UnsupportedDtype, match="give a number"):
            tree.insert([1, 2], [9], **options)
    assert tree.insert([1, 2], [9], **{name: torch.tensor(1.0)}, time=torch.tensor(2)).taken.tolist() == [9]


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
        ({"sealed": 0}, "sealed is 0; pass a SealedBlocks"),
        ({"chunk": "a"}, "chunk is 'a'; it counts keys"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"sink_tokens": 1.5}, "sink_tokens is 1.5; it counts keys"),
        ({"sink_tokens": 3}, "sink_tokens is 3 and the window is unbounded"),
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


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("cu_parts", torch.tensor(0), ShapeError),
        ("cu_parts", torch.zeros(0, dtype=torch.int64), ShapeError),
        ("cu_parts", torch.zeros(1, 3, dtype=torch.int32), ShapeError),
        ("cu_parts", torch.tensor([0.0, 6.0]), UnsupportedDtype),
        ("cu_parts", torch.tensor([False, True]), UnsupportedDtype),
        ("mask", torch.tensor(True), ShapeError),
        ("mask", torch.ones(6, 1, dtype=torch.bool), ShapeError),
        ("mask", torch.ones(5, dtype=torch.bool), ShapeError),
        ("mask", torch.ones(6, dtype=torch.int32), UnsupportedDtype),
        ("mask", torch.ones(6), UnsupportedDtype),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_merges_of_real_and_of_fake_tensors_refuse_the_same(name, given, error, device):
    out, lse, given = (each.to(device) for each in (torch.zeros(6, 2, 8), torch.zeros(6, 2), given))
    calls = {
        "mask": lambda: interop.merge_attention(out, lse, out, lse, mask=given),
        "cu_parts": lambda: interop.merge_attention_parts(out, lse, given),
    }
    with pytest.raises(error, match=f"{name} "):
        calls[name]()


@pytest.mark.parametrize("window", [2**31 - 1, 2**40, (2**31 - 1, None)])
def test_a_window_wider_than_any_sequence_has_no_bound_so_that_sinks_are_refused(window):
    step = make_step()
    options = {"cu_query_lens": step.cu_query_lens, "window": window}
    for attend in (interop.paged_attention, pagecore.paged_attention):
        attend(*step.attended, **options)
        with pytest.raises(UnsupportedOption, match="sink_tokens is 1 and the window is unbounded to the left"):
            attend(*step.attended, **options, sink_tokens=1)
