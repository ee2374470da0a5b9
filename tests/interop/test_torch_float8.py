"""float8 queries and outputs of the torch operator of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagecore import ops
from pagecore.errors import UnsupportedDtype, UnsupportedOption
from pagecore.interop.torch import paged_attention


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
    given = {name: value.to("meta") for name, value in call(torch.bfloat16).items()}
    for dtype in (torch.float16, torch.float8_e5m2):
        with pytest.raises(UnsupportedDtype, match=r"out is torch.*; it must be torch.bfloat16"):
            paged_attention(**given, out=torch.empty(3, 4, 64, dtype=dtype, device="meta"))


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
