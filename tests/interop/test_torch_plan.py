"""plan_attention as a torch operator: one plan for the layers of a step, in eager code and in graphs."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import ops
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.cuda.schedule._schedule import plan_shape
from tests.interop.steps import BLOCK, DIM, HEADS, KV_HEADS, compile_whole, make_step, torch

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

from torch._subclasses.fake_tensor import FakeTensorMode  # isort: skip

# Raised by a module of torch that inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
PLAN = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS}


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def plan_of(step, **options):
    return interop.plan_attention(step.cu_query_lens, step.seq_lens, num_tokens=step.query.shape[0], **PLAN | options)


def test_the_operators_pass_opcheck():
    step = make_step()
    operator = torch.ops.pagecore.plan_attention.default
    torch.library.opcheck(operator, (step.cu_query_lens, step.seq_lens), {"num_tokens": 7, **PLAN, "window_left": 3})
    torch.library.opcheck(operator, (None, step.seq_lens), {"num_tokens": 3, **PLAN})
    options = {"cu_query_lens": step.cu_query_lens, "plan": plan_of(step)}
    for name in ("paged_attention", "paged_attention_lse"):
        torch.library.opcheck(getattr(torch.ops.pagecore, name).default, step.attended, options)
    out = torch.empty_like(step.query)
    torch.library.opcheck(torch.ops.pagecore.paged_attention_out.default, (*step.attended, out), options)


@pytest.mark.parametrize(
    "limits", [{}, {"window": 3}, {"window": (2, None)}, {"chunk": 4}, {"window": 3, "sink_tokens": 2}], ids=str
)
def test_calls_with_a_plan_equal_calls_without_one(limits):
    step, plan = make_step(), plan_of(make_step(), **limits)
    options = {"cu_query_lens": step.cu_query_lens, **limits}
    expected, expected_lse = interop.paged_attention(*step.attended, **options, return_lse=True)
    out, lse = interop.paged_attention(*step.attended, **options, plan=plan, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    into = torch.empty_like(step.query)
    interop.paged_attention(*step.attended, **options, plan=plan, out=into)
    assert torch.equal(into, expected)
    assert torch.equal(ops.paged_attention(*step.attended, **options, plan=plan), expected)


def test_without_cu_query_lens_each_sequence_has_one_query():
    step = make_step()
    plan = interop.plan_attention(None, step.seq_lens, **PLAN)
    attended = step.query[:3], *step.attended[1:]
    assert torch.equal(interop.paged_attention(*attended, plan=plan), interop.paged_attention(*attended))


@pytest.mark.parametrize(("num_tokens", "num_sequences"), [(3, 3), (500, 3), (8192, 256), (0, 0)])
def test_the_shape_of_a_device_plan_is_known_without_memory(num_tokens, num_sequences):
    """Checked on the meta device and on fake CUDA tensors, which need no GPU."""
    expected = plan_shape(num_sequences, num_tokens, 32, 8)
    heads = {"num_query_heads": 32, "num_kv_heads": 8}
    lens = torch.empty(num_sequences, dtype=torch.int32, device="meta")
    cu = torch.empty(num_sequences + 1, dtype=torch.int32, device="meta")
    plan = interop.plan_attention(cu, lens, num_tokens=num_tokens, **heads)
    assert (plan.shape, plan.dtype, plan.is_contiguous()) == (expected, torch.uint8, True)
    with FakeTensorMode() as mode:
        lens = mode.from_tensor(lens)
        lens.fake_device = torch.device("cuda:0")
        plan = interop.plan_attention(None, lens, **heads)
        assert plan.shape == plan_shape(num_sequences, num_sequences, 32, 8)
        assert plan.device == torch.device("cuda:0")


REFUSED = {
    "num_tokens is missing": (lambda s: interop.plan_attention(s.cu_query_lens, s.seq_lens, **PLAN), ShapeError),
    "num_query_heads is 5 and num_kv_heads 2": (lambda s: plan_of(s, num_query_heads=5), ShapeError),
    "num_query_heads is 4 and num_kv_heads 0": (lambda s: plan_of(s, num_kv_heads=0), ShapeError),
    "cu_query_lens has 3 entries; expected 4": (
        lambda s: interop.plan_attention(s.cu_query_lens[1:], s.seq_lens, num_tokens=7, **PLAN),
        ShapeError,
    ),
    "seq_lens has shape": (lambda s: interop.plan_attention(None, s.block_table, **PLAN), ShapeError),
    "seq_lens is torch.float32": (lambda s: interop.plan_attention(None, s.seq_lens.float(), **PLAN), UnsupportedDtype),
    "seq_lens is a list": (lambda s: interop.plan_attention(None, [1, 2], **PLAN), UnsupportedDtype),
    "cu_query_lens is a list": (
        lambda s: interop.plan_attention([0, 1], s.seq_lens[:1], num_tokens=1, **PLAN),
        UnsupportedDtype,
    ),
    "window is 0": (lambda s: plan_of(s, window=0), UnsupportedOption),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_arguments_of_a_plan_raise(message):
    call, error = REFUSED[message]
    with pytest.raises(error, match=message):
        call(make_step())


def test_a_plan_that_does_not_match_the_call_raises():
    step = make_step()
    options = {"cu_query_lens": step.cu_query_lens}
    for plan, error, message in (
        (interop.plan_attention(None, step.seq_lens[:2], **PLAN), ShapeError, "one more than seq_lens"),
        (torch.zeros(4, 16, dtype=torch.uint8), ShapeError, "the host plans each call"),
        (torch.zeros(4, 0), UnsupportedDtype, "plan is float32"),
        (torch.zeros(0, dtype=torch.uint8), ShapeError, "plan has"),
        (torch.zeros(4, 0, dtype=torch.uint8, device="meta"), DeviceError, "meta"),
        (np.zeros((4, 0), np.uint8), UnsupportedDtype, "plan is a numpy.ndarray"),
    ):
        with pytest.raises(error, match=message):
            interop.paged_attention(*step.attended, **options, plan=plan)


# ---- graphs


def layers(query, caches, table, lens, starts, *, shared):
    """Run layers that share one plan, or that each plan with equal arguments."""
    plan = None
    for key_cache, value_cache in caches:
        if plan is None or not shared:
            plan = interop.plan_attention(starts, lens, num_tokens=query.shape[0], **PLAN)
        query = query + interop.paged_attention(
            query, key_cache, value_cache, table, lens, cu_query_lens=starts, plan=plan
        )
    return query


def arguments(step):
    caches = [(step.key_cache, step.value_cache), (step.value_cache, step.key_cache), (step.key_cache, step.key_cache)]
    return step.query, caches, step.block_table, step.seq_lens, step.cu_query_lens


@BACKENDS
@pytest.mark.parametrize("shared", [True, False])
def test_a_full_graph_plans_and_attends(backend, shared):
    step = make_step()
    compiled = compile_whole(layers, backend)
    torch.testing.assert_close(compiled(*arguments(step), shared=shared), layers(*arguments(step), shared=True))


def test_the_layers_of_a_graph_plan_once():
    targets = []

    def backend(graph, inputs):
        def count(graph, inputs):
            targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=count)(graph, inputs)

    step = make_step()
    with torch.no_grad():
        torch.compile(layers, fullgraph=True, backend=backend)(*arguments(step), shared=True)
    assert targets.count("pagecore.plan_attention.default") == 1
    assert targets.count("pagecore.paged_attention_lse.default") == 3


def test_one_graph_serves_every_number_of_sequences_and_tokens():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = make_step()

    def attend(query, table, lens):
        plan = interop.plan_attention(None, lens, **PLAN)
        return interop.paged_attention(query, step.key_cache, step.value_cache, table, lens, plan=plan)

    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (7, 3, 5, 8):
        query, lens = torch.randn(tokens, HEADS, DIM), torch.full((tokens,), BLOCK, dtype=torch.int32)
        table = torch.arange(1, tokens + 1, dtype=torch.int32)[:, None]
        assert torch.equal(compiled(query, table, lens), attend(query, table, lens))
    assert counter.frame_count == 1


def test_tracing_raises_for_a_plan_of_another_batch():
    step = make_step()

    def attend(query, table, lens, starts):
        plan = interop.plan_attention(None, lens[:2], **PLAN)
        return interop.paged_attention(
            query, step.key_cache, step.value_cache, table, lens, cu_query_lens=starts, plan=plan
        )

    with pytest.raises(RuntimeError, match=r"plan has dtype torch.uint8 and shape.*pass the result of plan_attention"):
        torch.compile(attend, fullgraph=True, backend="aot_eager")(
            step.query, step.block_table, step.seq_lens, step.cu_query_lens
        )


class Layers(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.register_buffer("key_cache", step.key_cache)
        self.register_buffer("value_cache", step.value_cache)

    def forward(self, query, table, lens):
        plan = interop.plan_attention(None, lens, **PLAN)
        for caches in ((self.key_cache, self.value_cache), (self.value_cache, self.key_cache)):
            query = query + interop.paged_attention(query, *caches, table, lens, plan=plan)
        return query


def test_torch_export_of_a_plan_with_its_layers():
    step = make_step()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    given = (torch.randn(3, HEADS, DIM), step.block_table, step.seq_lens)
    program = torch.export.export(Layers(step), given, dynamic_shapes=[{0: tokens}] * 3)
    assert program.graph_module.code.count("pagecore.plan_attention") == 1
    exported = program.module()
    for count in (3, 2, 1):
        some = tuple(array[:count] for array in given)
        assert torch.equal(exported(*some), Layers(step)(*some))
