"""float8 queries and outputs of the torch operator of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import ops
from pagecore.errors import UnsupportedDtype, UnsupportedOption
from tests.interop.steps import torch

from pagecore.interop.torch import paged_attention  # isort: skip  # after steps, which skips where torch is missing


def call(dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 6, 16, 2, 64, generator=random).to(torch.bfloat16)
    return {
        "query": torch.randn(3, 4, 64, generator=random).to(dtype),
        "key_cache": key,
        "value_cache": value,
        "block_table": torch.tensor([[1, 2], [3, 4], [5, 0]]),
        "seq_lens": torch.tensor([30, 17, 9]),
    }


def on_meta(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") for name, value in given.items()}


def expected(given: dict[str, Any], scale: Any = 1.0) -> Any:
    """Return the attention of the query's numbers in float32."""
    numbers = given["query"].float() * torch.as_tensor(scale).repeat_interleave(2)[:, None]
    caches = {name: given[name].float() for name in ("key_cache", "value_cache")}
    return paged_attention(**{**given, "query": numbers, **caches})


@pytest.mark.parametrize("scale", [0.5, torch.tensor([0.5, 2.0]), torch.tensor([3.0])])
def test_queries_and_outputs_in_float8(scale):
    given = call()
    wanted = expected(given, torch.as_tensor(scale).expand(2))
    out = paged_attention(**given, query_scale=scale)
    assert out.dtype == torch.bfloat16
    assert (out.float() - wanted).abs().max() < 0.03
    for output_scale in (0.02, torch.tensor([0.02])):
        out = paged_attention(**given, query_scale=scale, output_scale=output_scale)
        assert out.dtype == torch.float8_e4m3fn
        assert ((out.float() * 0.02 - wanted).abs() < 0.03 + wanted.abs() / 16).all()
        into = torch.empty(3, 4, 64, dtype=torch.float8_e4m3fn)
        paged_attention(**given, query_scale=scale, output_scale=output_scale, out=into)
        np.testing.assert_array_equal(into.view(torch.uint8), out.view(torch.uint8))


def test_a_compiled_call_has_the_dtypes_of_an_eager_one():
    def attend(given: dict[str, Any], scale: torch.Tensor) -> tuple[Any, Any]:
        return paged_attention(**given, query_scale=scale), paged_attention(**given, output_scale=scale[:1])

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        given, scale = call(dtype), torch.tensor([0.5, 2.0])
        for one, other in zip(compiled(given, scale), attend(given, scale), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_traced_call_refuses_other_dtypes_of_out():
    given = on_meta(call(torch.bfloat16))
    for dtype in (torch.float16, torch.float8_e5m2):
        with pytest.raises(UnsupportedDtype, match=r"out is .*; it must be torch.bfloat16 or torch.float8_e4m3fn$"):
            paged_attention(**given, out=torch.empty(3, 4, 64, dtype=dtype, device="meta"))
    every = "torch.float32 or torch.float16 or torch.bfloat16 or torch.float8_e4m3fn"
    with pytest.raises(UnsupportedDtype, match=f"out is torch.float8_e5m2; it must be {every}$"):
        paged_attention(**on_meta(call()), out=torch.empty(3, 4, 64, dtype=torch.float8_e5m2, device="meta"))


def test_a_traced_call_refuses_a_scale_of_an_output_in_another_dtype():
    for given in (call(torch.bfloat16), call()):
        out = torch.empty(3, 4, 64, dtype=torch.bfloat16)
        for arrays, place in ((given, "cpu"), (on_meta(given), "meta")):
            with pytest.raises(UnsupportedOption, match=r"output_scale is given and out is .*bfloat16; only an output"):
                paged_attention(**arrays, out=out.to(place), output_scale=0.5)


@pytest.mark.parametrize("number", [-1.0, 0.0, 1e-40, float("nan"), float("inf"), 1e39, np.float32(-1)])
@pytest.mark.parametrize("name", ["query_scale", "output_scale"])
def test_numbers_are_checked_before_they_become_tensors(name, number):
    for arrays in (call(), on_meta(call())):
        with pytest.raises(UnsupportedOption, match=f"{name} (is|holds) "):
            paged_attention(**arrays, **{name: number})


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_other_scales_must_be_finite(name):
    for number in (float("nan"), 1e39):
        with pytest.raises(UnsupportedOption, match=f"{name} is .*; it must be finite as a float32"):
            paged_attention(**on_meta(call(torch.bfloat16)), **{name: number})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_new_output_has_the_dtype_of_half_caches(dtype):
    given = call()
    given |= {name: given[name].to(dtype) for name in ("key_cache", "value_cache")}
    assert paged_attention(**given).dtype == paged_attention(**on_meta(given)).dtype == dtype


@pytest.mark.parametrize("name", ["paged_attention", "paged_attention_lse", "paged_attention_out"])
def test_float8_queries_and_outputs_pass_opcheck(name):
    given = call()
    options = {"query_scale": torch.tensor([0.5, 2.0]), "output_scale": torch.tensor([0.1])}
    out = [torch.empty(3, 4, 64, dtype=torch.float8_e4m3fn)] if name == "paged_attention_out" else []
    # Without test_schema: it multiplies, which torch does not implement for float8.
    checks = ["test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if name == "paged_attention_out" else []
    operator = getattr(torch.ops.pagecore, name).default
    torch.library.opcheck(operator, (*given.values(), *out), options, test_utils=checks)


def test_scales_without_float8_are_refused():
    given = call(torch.bfloat16)
    with pytest.raises(UnsupportedOption, match="query_scale is given and query is bfloat16"):
        paged_attention(**given, query_scale=0.5)
    with pytest.raises(UnsupportedOption, match="output_scale is given and out is bfloat16"):
        paged_attention(**given, output_scale=0.5, out=torch.empty_like(given["query"]))
    with pytest.raises(UnsupportedOption, match="query_scale is True"):
        paged_attention(**given, query_scale=True)


def test_the_same_numbers_as_the_function_of_the_package():
    given = call()
    one = paged_attention(**given, query_scale=0.5, output_scale=0.1)
    other = ops.paged_attention(**given, query_scale=0.5, output_scale=0.1)
    assert isinstance(other, torch.Tensor)
    np.testing.assert_array_equal(one.view(torch.uint8), other.view(torch.uint8))
