"""The torch operators under torch.compile and torch.export: full graphs, in-place writes in order, dynamic shapes."""

from __future__ import annotations

import pytest

from pagecore import ops
from tests.interop.steps import BLOCK, DIM, HEADS, KV_HEADS, compile_whole, make_step, torch
from tests.thinning import in_turn

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

# Raised by a module of torch that inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
LAYOUTS = [None, "layerwise", "blockwise"]
BACKENDS = ["eager", "aot_eager", "inductor"]
COPIED = torch.tensor([[3, 8]])


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def written(monkeypatch):
    """Record the addresses of the caches of each write."""
    seen = []

    def write(key, value, key_cache, value_cache, *rest, **scales):
        seen.append((key_cache.data_ptr(), value_cache.data_ptr()))
        original(key, value, key_cache, value_cache, *rest, **scales)

    original = ops.write_kv
    monkeypatch.setattr(ops, "write_kv", write)
    return seen


def layers(query, key, value, key_cache, value_cache, slots, table, lens, starts):
    """Write to the same slots twice and attend after each write; the result depends on the order."""
    outs = []
    for factor in (1, 3):
        interop.write_kv(factor * key, value + factor, key_cache, value_cache, slots)
        outs.append(
            interop.paged_attention(
                query + factor, key_cache, value_cache, table, lens, cu_query_lens=starts, window=4, softcap=30.0
            )
        )
    interop.copy_blocks([key_cache, value_cache], COPIED)
    first, lse = interop.paged_attention(
        query, key_cache, value_cache, table, lens, cu_query_lens=starts, return_lse=True
    )
    merged, _ = interop.merge_attention(first, lse, outs[0], lse)
    into = torch.zeros_like(query)
    interop.paged_attention(query, key_cache, value_cache, table, lens, cu_query_lens=starts, scale=0.1, out=into)
    return *outs, merged, into


def arguments(step):
    return (
        *(step.query, step.key, step.value, step.key_cache, step.value_cache, step.slot_mapping),
        *(step.block_table, step.seq_lens, step.cu_query_lens),
    )


@pytest.mark.parametrize(("layout", "backend", "dtype"), in_turn(LAYOUTS, BACKENDS, over=[["float32", "bfloat16"]]))
def test_a_full_graph_equals_eager_code(layout, backend, dtype):
    eager, compiled = make_step(dtype, layout), make_step(dtype, layout)
    expected = layers(*arguments(eager))
    got = compile_whole(layers, backend)(*arguments(compiled))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(compiled.key_cache, eager.key_cache, rtol=0, atol=0)
    torch.testing.assert_close(compiled.value_cache, eager.value_cache, rtol=0, atol=0)


def model(query, caches, slots, table, lens, starts):
    attended = None
    for key_cache, value_cache in caches:
        query = query if attended is None else query + attended
        key, value = query[:, :KV_HEADS] * 2, query[:, KV_HEADS:] + 1
        interop.write_kv(key, value, key_cache, value_cache, slots)
        attended = interop.paged_attention(query, key_cache, value_cache, table, lens, cu_query_lens=starts)
    return attended


def model_and_more(query, caches, slots, table, lens, starts):
    attended = model(query, caches, slots, table, lens, starts)
    out = torch.zeros_like(query)  # a constant, if the operator did not declare that it writes
    interop.paged_attention(query, *caches[0], table, lens, cu_query_lens=starts, scale=0.1, out=out)
    return attended, out


@pytest.mark.parametrize(
    ("layout", "dynamic", "kernels"),
    [*in_turn(LAYOUTS, over=[[True, None], ["torch's kernels"]]), ("blockwise", None, "compiled kernels")],
)
def test_inductor_writes_to_the_caches_in_place(layout, dynamic, kernels, written):
    steps, expected = ([make_step(layout=layout) for _ in range(2)] for _ in range(2))
    caches = [(step.key_cache, step.value_cache) for step in steps]
    first = steps[0]
    given = (first.slot_mapping, first.block_table, first.seq_lens, first.cu_query_lens)
    if kernels == "compiled kernels":
        function, compiled = model, torch.compile(model, fullgraph=True, dynamic=dynamic)
    else:
        function, compiled = model_and_more, compile_whole(model_and_more, "inductor", dynamic=dynamic)
    got = compiled(first.query, caches, *given)
    assert written == [(key_cache.data_ptr(), value_cache.data_ptr()) for key_cache, value_cache in caches]
    others = [(step.key_cache, step.value_cache) for step in expected]
    torch.testing.assert_close(got, function(first.query, others, *given))
    for step, twin in zip(steps, expected, strict=True):
        torch.testing.assert_close((step.key_cache, step.value_cache), (twin.key_cache, twin.value_cache))


def test_writes_after_an_attention_that_is_used_later_stay_in_place(written, monkeypatch):
    """Inductor moves calls to the use of their only result: past a write, it would have to copy the caches."""

    def attend_write_copy(query, key, value, key_cache, value_cache, slots, table, lens, starts):
        first = interop.paged_attention(query, key_cache, value_cache, table, lens, cu_query_lens=starts)
        interop.write_kv(key, value, key_cache, value_cache, slots)
        second = interop.paged_attention(query, key_cache, value_cache, table, lens, cu_query_lens=starts)
        interop.copy_blocks([key_cache, value_cache], COPIED)
        return 2 * first + second

    def copy(caches, *rest, **options):
        copied.append(tuple(cache.data_ptr() for cache in caches))
        original(caches, *rest, **options)

    copied, original = [], ops.copy_blocks
    monkeypatch.setattr(ops, "copy_blocks", copy)
    step, twin = make_step(), make_step()
    got = compile_whole(attend_write_copy, "inductor")(*arguments(step))
    assert written == copied == [(step.key_cache.data_ptr(), step.value_cache.data_ptr())]
    torch.testing.assert_close(got, attend_write_copy(*arguments(twin)))
    torch.testing.assert_close((step.key_cache, step.value_cache), (twin.key_cache, twin.value_cache))


def test_one_dynamic_graph_serves_every_number_of_tokens():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = make_step()
    compiled = torch.compile(
        lambda q, table, lens: interop.paged_attention(q, step.key_cache, step.value_cache, table, lens),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    for tokens in (7, 3, 5, 8):  # the first length differs from that of every other axis
        query, lens = torch.randn(tokens, HEADS, DIM), torch.full((tokens,), BLOCK, dtype=torch.int32)
        table = torch.arange(1, tokens + 1, dtype=torch.int32)[:, None]
        expected = ops.paged_attention(query, step.key_cache, step.value_cache, table, lens)
        assert torch.equal(compiled(query, table, lens), expected)
    assert counter.frame_count == 1


def both_planes(key, stacked, slots):
    interop.write_kv(key, key + 1, stacked[0], stacked[1], slots)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_reach_views_created_inside_the_graph(backend):
    step, stacked = make_step(), torch.zeros(2, 9, BLOCK, KV_HEADS, DIM)
    compile_whole(both_planes, backend)(step.key, stacked, step.slot_mapping)
    expected = torch.zeros_like(stacked)
    both_planes(step.key, expected, step.slot_mapping)
    assert torch.equal(stacked, expected)


SLICES = {
    "interleaved": ((9, BLOCK, KV_HEADS, 2 * DIM), lambda whole, _: whole.split(DIM, dim=-1)),
    "heads first": ((2, 9, KV_HEADS, BLOCK, DIM), lambda whole, _: whole.transpose(2, 3).unbind(0)),
    "a layer of many": ((3, 2, 9, BLOCK, KV_HEADS, DIM), lambda whole, layer: whole[layer].unbind(0)),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("cut", SLICES)
def test_planes_sliced_inside_the_graph_are_written_and_read(cut, backend):
    shape, planes = SLICES[cut]

    def layer(step, whole, number):
        caches = planes(whole, number)
        interop.write_kv(step.key + number, step.value, *caches, step.slot_mapping)
        return interop.paged_attention(
            step.query, *caches, step.block_table, step.seq_lens, cu_query_lens=step.cu_query_lens
        )

    step, whole, expected = make_step(), torch.zeros(shape), torch.zeros(shape)
    compiled = compile_whole(layer, backend, dynamic=False)
    for number in (2, 1) if backend == "aot_eager" else (1,):  # each has a graph of its own
        torch.testing.assert_close(compiled(step, whole, number), layer(step, expected, number))
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_32_and_64_bits_and_empty_batches(dtype):
    step = make_step()
    written = step.key_cache.clone()
    compiled = torch.compile(interop.write_kv, fullgraph=True, backend="aot_eager")
    compiled(step.key, step.value, step.key_cache, step.value_cache, step.slot_mapping.to(dtype))
    ops.write_kv(step.key, step.value, written, step.value_cache, step.slot_mapping)
    assert torch.equal(step.key_cache, written)
    compiled(step.key[:0], step.value[:0], step.key_cache, step.value_cache, step.slot_mapping[:0].to(dtype))
    assert torch.equal(step.key_cache, written)
    nothing = torch.compile(interop.paged_attention, fullgraph=True, backend="aot_eager")(
        step.query[:0], step.key_cache, step.value_cache, step.block_table[:0], step.seq_lens[:0]
    )
    assert nothing.shape == (0, HEADS, DIM)


def test_views_with_symbolic_offsets_raise():
    step, stacked = make_step(), torch.zeros(2, 9, BLOCK, KV_HEADS, DIM)
    compiled = torch.compile(both_planes, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(RuntimeError, match=r"value_cache is a view whose offset.*mark_static"):
        compiled(step.key, stacked, step.slot_mapping)
    torch._dynamo.mark_static(stacked)
    compiled(step.key, stacked, step.slot_mapping)
    assert torch.equal(stacked[0, 3], step.key[:4])


def test_tracing_raises_for_arrays_that_require_grad():
    step = make_step()
    query = step.query.requires_grad_()

    def attend(query):
        return interop.paged_attention(query, *step.attended[1:], cu_query_lens=step.cu_query_lens)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"query requires grad.*detach"):
        compiled(query)
    assert compiled(query.detach()).shape == query.shape


class Layer(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.register_buffer("key_cache", step.key_cache)
        self.register_buffer("value_cache", step.value_cache)

    def forward(self, query, key, value, slots, table, lens):
        interop.write_kv(key, value, self.key_cache, self.value_cache, slots)
        return interop.paged_attention(query, self.key_cache, self.value_cache, table, lens)


def test_torch_export_of_a_layer_with_its_caches():
    step, twin = make_step(), make_step()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    query, table = torch.randn(3, HEADS, DIM), step.block_table
    given = (query, step.key[:3], step.value[:3], step.slot_mapping[:3], table, step.seq_lens)
    program = torch.export.export(Layer(step), given, dynamic_shapes=[{0: tokens}] * 6)
    assert "pagecore.write_kv" in program.graph_module.code
    exported = program.module()
    for count in (3, 2):
        some = tuple(array[:count] for array in given)
        assert torch.equal(exported(*some), Layer(twin)(*some))
    assert torch.equal(exported.key_cache, twin.key_cache)
