"""torch, JAX and CuPy on a GPU: shared memory, results of the caller's framework, streams and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from tests.capabilities import missing, require
from tests.passing import passing

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16
LENS = (37, 128, 1)
TABLE = ((3, 9, 5, 0, 0, 0, 0, 0), (8, 2, 11, 4, 7, 10, 1, 6), (12, 0, 0, 0, 0, 0, 0, 0))


@pytest.fixture(scope="session")
def torch_cuda(torch: Any, gpu: Any) -> Any:
    if not torch.cuda.is_available():
        missing("gpu", "torch finds no CUDA device")
    return torch


@pytest.fixture(scope="session")
def jax_cuda(jax: Any, gpu: Any) -> Any:
    if jax.default_backend() not in ("gpu", "cuda"):
        missing("gpu", "JAX finds no CUDA device")
    return jax


class Batch:
    """Sequences in a paged cache of torch tensors on the device."""

    def __init__(self, torch: Any, dtype: Any) -> None:
        random = torch.Generator("cuda").manual_seed(0)
        shape = (13, BLOCK, KV_HEADS, DIM)
        self.key_cache, self.value_cache = (
            torch.randn(shape, generator=random, device="cuda").to(dtype) for _ in range(2)
        )
        self.query = torch.randn((len(LENS), HEADS, DIM), generator=random, device="cuda").to(dtype)
        self.table = torch.tensor(TABLE, dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(LENS, dtype=torch.int32, device="cuda")

    def expected(self, torch: Any, lens: tuple[int, ...] = LENS) -> Any:
        """Return the attention of every query in float64."""
        rows = []
        for i, length in enumerate(lens):
            planes = (cache[self.table[i].long()].flatten(0, 1) for cache in (self.key_cache, self.value_cache))
            key, value = (plane[:length].double().repeat_interleave(HEADS // KV_HEADS, 1) for plane in planes)
            scores = torch.einsum("hd,khd->hk", self.query[i].double(), key) / DIM**0.5
            rows.append(torch.einsum("hk,khd->hd", torch.softmax(scores, 1), value))
        return torch.stack(rows)

    def attend(self, **options: Any) -> Any:
        return pagecore.paged_attention(self.query, self.key_cache, self.value_cache, self.table, self.lens, **options)


def assert_close(got: Any, expected: Any, tolerance: float = 6e-3) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= tolerance


def captured(torch: Any, step: Any) -> tuple[Any, Any]:
    """Run a step once, so that its kernels are loaded, and capture it; return the graph and the result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = step()
    return graph, result


def test_torch_and_tensors_share_memory_both_ways(cuda, torch_cuda):
    torch = torch_cuda
    tensor = pagecore.zeros((3, 5), "bfloat16", cuda.device)
    array = torch.from_dlpack(tensor)
    assert (array.data_ptr(), array.dtype, array.device.index) == (tensor.pointer, torch.bfloat16, 0)
    array.fill_(2.5)
    torch.cuda.synchronize()
    assert (cuda.get(tensor).astype(np.float32) == 2.5).all()
    back = pagecore.as_tensor(array[1:, ::2])
    assert (back.pointer, back.strides, back.device) == (array[1:].data_ptr(), (10, 4), cuda.device)


def test_results_for_torch_are_torch_tensors(cuda, torch_cuda):
    batch = Batch(torch_cuda, torch_cuda.bfloat16)
    out, lse = batch.attend(return_lse=True)
    assert (type(out), out.dtype, out.shape) == (torch_cuda.Tensor, torch_cuda.bfloat16, batch.query.shape)
    assert (lse.dtype, lse.shape, lse.device) == (torch_cuda.float32, (3, HEADS), out.device)
    assert_close(out, batch.expected(torch_cuda))


def test_work_goes_to_torch_s_current_stream(cuda, torch_cuda):
    """The call runs after slow work on that stream and before later reads there, without synchronizing."""
    torch = torch_cuda
    batch = Batch(torch, torch.bfloat16)
    expected = batch.expected(torch)
    right, stream = batch.query.clone(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            batch.query.fill_(torch.nan)
            for _ in range(10):
                torch.mm(busy, busy)
            batch.query.copy_(right)
            out = batch.attend()
            kept = out.clone()
        stream.synchronize()
        assert_close(kept, expected)


def test_an_explicit_stream_is_used(cuda, torch_cuda):
    torch = torch_cuda
    batch = Batch(torch, torch.bfloat16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for named in (stream, stream.cuda_stream):
        out = batch.attend(stream=named)
        stream.synchronize()
        assert_close(out, batch.expected(torch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_torch_become_codes_on_torch_s_stream(cuda, torch_cuda, dtype):
    torch = torch_cuda
    state, stream = torch.randn(36, 32, 128, 128, device="cuda").to(getattr(torch, dtype)), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        codes, scales = pagecore.quantize_state(state)
        read = pagecore.dequantize_state(codes, scales)
    stream.synchronize()
    expected = pagecore.quantize_state(state.cpu())
    assert (type(codes), codes.dtype, scales.dtype) == (torch.Tensor, torch.int8, state.dtype)
    assert torch.equal(codes.cpu(), expected[0])
    assert torch.equal(scales.cpu(), expected[1])
    assert torch.equal(read.cpu(), pagecore.dequantize_state(*expected))


def test_an_importer_on_another_stream_sees_the_computed_result(cuda, torch_cuda):
    torch = torch_cuda
    batch = Batch(torch, torch.bfloat16)
    query = pagecore.empty(batch.query.shape, "bfloat16", cuda.device)
    torch.from_dlpack(query).copy_(batch.query)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(first):
            for _ in range(10):
                torch.mm(busy, busy)
        out = pagecore.paged_attention(
            query, batch.key_cache, batch.value_cache, batch.table, batch.lens, stream=first.cuda_stream
        )
        with torch.cuda.stream(second):
            seen = torch.from_dlpack(out).clone()
        second.synchronize()
        assert_close(seen, batch.expected(torch))


def test_layers_share_a_plan_of_the_operator_and_a_graph_replans(cuda, torch_cuda):
    torch = torch_cuda
    import pagecore.interop.torch as interop

    batch = Batch(torch, torch.bfloat16)
    heads = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS}
    torch.library.opcheck(torch.ops.pagecore.plan_attention.default, (None, batch.lens), {"num_tokens": 3, **heads})
    arrays = (batch.query, batch.key_cache, batch.value_cache, batch.table, batch.lens)

    def step() -> Any:
        plan = interop.plan_attention(None, batch.lens, **heads)
        return [interop.paged_attention(*arrays, plan=plan) for _ in range(2)]

    for out in step():
        assert torch.equal(out, interop.paged_attention(*arrays))
    for out in torch.compile(step, fullgraph=True, backend="aot_eager")():
        assert_close(out, batch.expected(torch))
    graph, outs = captured(torch, step)
    for lens in ((37, 128, 1), (48, 100, 16), (1, 1, 1)):
        batch.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert_close(out, batch.expected(torch, lens))


def test_a_graph_serves_other_slots_and_lengths_than_those_it_was_captured_with(cuda, torch_cuda):
    torch = torch_cuda
    batch = Batch(torch, torch.bfloat16)
    key, value = (torch.randn((3, KV_HEADS, DIM), device="cuda").bfloat16() for _ in range(2))
    slots = torch.full((3,), -1, dtype=torch.int64, device="cuda")
    out = torch.empty_like(batch.query)
    plan = pagecore.AttentionPlan(
        num_query_heads=HEADS, num_kv_heads=KV_HEADS, device=cuda.device, max_sequences=3, max_tokens=3
    )
    pagecore.plan_attention(None, LENS, num_query_heads=HEADS, num_kv_heads=KV_HEADS, out=plan)

    def step() -> None:
        pagecore.write_kv(key, value, batch.key_cache, batch.value_cache, slots)
        batch.attend(plan=plan, out=out)

    graph, _ = captured(torch, step)
    for lens in ((38, 127, 2), (1, 1, 1), (48, 100, 16)):
        table = torch.tensor(TABLE)
        places = [int(table[i, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK for i, n in enumerate(lens)]
        slots.copy_(torch.tensor(places))
        batch.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        for array in (key, value, batch.query):
            array.normal_()
        out.fill_(torch.nan)
        pagecore.plan_attention(None, lens, num_query_heads=HEADS, num_kv_heads=KV_HEADS, out=plan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for i, place in enumerate(places):
            assert torch.equal(batch.key_cache.flatten(0, 1)[place], key[i])
        assert_close(out, batch.expected(torch, lens))


def test_a_graph_of_torch_operators_plans_at_each_launch(cuda, torch_cuda):
    torch = torch_cuda
    from pagecore.interop.torch import paged_attention

    batch = Batch(torch, torch.bfloat16)

    def step() -> Any:
        return paged_attention(batch.query, batch.key_cache, batch.value_cache, batch.table, batch.lens)

    graph, out = captured(torch, step)
    # New memory must not overlap that of the graph.
    others = [torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    for lens in ((38, 127, 2), (1, 1, 1), (48, 100, 16)):
        batch.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        batch.query.normal_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, batch.expected(torch, lens))
    assert all(bool((other == -1).all()) for other in others)


def test_jax_shares_the_memory_of_a_tensor(cuda, jax_cuda):
    tensor = pagecore.zeros((3, 64), "float32", cuda.device)
    array = jax_cuda.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.pointer
    back = pagecore.as_tensor(array)
    assert (back.pointer, back.readonly, back.device) == (tensor.pointer, True, cuda.device)


def test_jax_arrays_are_written_to_a_cache_and_results_are_jax_arrays(cuda, jax_cuda):
    """JAX is still computing the arrays when the calls are made."""
    jnp = jax_cuda.numpy
    caches = [pagecore.zeros((4, BLOCK, KV_HEADS, DIM), "float32", cuda.device) for _ in range(2)]
    for seed in range(5):
        key = jax_cuda.random.key(seed)
        busy = jax_cuda.random.normal(key, (4096, 4096))
        for _ in range(5):
            busy = jnp.tanh(busy @ busy)
        new = jax_cuda.random.normal(key, (2, 20, KV_HEADS, DIM)) + 0 * busy[0, 0]
        pagecore.write_kv(new[0], new[1], *caches, list(range(BLOCK, BLOCK + 20)))
        query = jax_cuda.random.normal(key, (1, HEADS, DIM))
        out = pagecore.paged_attention(query, *caches, [[1, 2]], [20])
        assert isinstance(out, jax_cuda.Array)
        keys, values = np.repeat(np.asarray(new, np.float64), HEADS // KV_HEADS, 2)
        scores = np.einsum("hd,khd->hk", np.asarray(query[0], np.float64), keys) / DIM**0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values)
        np.testing.assert_allclose(np.asarray(out[0]), expected, rtol=1e-4, atol=1e-5)


def test_cupy_and_tensors_share_memory_both_ways(cuda):
    cupy = require("cupy")
    tensor = pagecore.zeros((3, 5), "float32", cuda.device)
    array = tensor[1:, ::-1].cupy()
    array[...] = cupy.arange(10).reshape(2, 5)
    cupy.cuda.Device(0).synchronize()
    np.testing.assert_array_equal(cuda.get(tensor)[1:, ::-1], np.arange(10).reshape(2, 5))
    back = pagecore.as_tensor(array)
    assert (back.pointer, back.strides) == (array.data.ptr, array.strides)


def test_results_for_cupy_are_cupy_arrays(cuda):
    cupy = require("cupy")
    cache = cupy.random.standard_normal((4, BLOCK, KV_HEADS, DIM)).astype(cupy.float16)
    query = cupy.random.standard_normal((1, HEADS, DIM)).astype(cupy.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = pagecore.paged_attention(query, cache, cache, cupy.asarray([[1, 2]]), cupy.asarray([20]))
        assert isinstance(out, cupy.ndarray)
        stream.synchronize()
    assert out.dtype == cupy.float16
    assert bool(cupy.isfinite(out).all())


def test_transformers_generates_on_any_stream(torch_cuda: Any) -> None:
    """The cache uploads its arrays on the stream that the model runs on."""
    transformers = require("transformers")
    from pagecore.interop.transformers import PagedCache

    torch = torch_cuda
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    ids = torch.randint(2, 97, (2, 20), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    model.set_attn_implementation("pagecore")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = model.generate(ids, **passing(PagedCache(model, num_blocks=64)), **options)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(got, expected)
