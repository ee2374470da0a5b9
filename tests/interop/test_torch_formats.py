"""torch operators over caches of codes: opcheck, parity with pagecore's own functions, and compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagecore import ops
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.errors import PagecoreError, UnsupportedOption
from tests.interop.steps import compile_whole, torch
from tests.thinning import in_turn

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

# Raised by a module of torch that inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
BLOCKS, SIZE, HEADS, QUERY_HEADS, DIM, TOKENS = 9, 4, 2, 4, 32, 7
BACKENDS = ["aot_eager", "inductor"]
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@dataclass
class Caches:
    """Codes of keys and values, their stored scales or None, and the arguments that go with the format."""

    codes: list[Any]
    scales: list[Any]
    factors: dict[str, Any]

    def clone(self) -> Caches:
        copies = [[None if each is None else each.clone() for each in group] for group in (self.codes, self.scales)]
        return Caches(copies[0], copies[1], self.factors)

    @property
    def options(self) -> dict[str, Any]:
        planes = dict(zip(("key_scale", "value_scale"), self.scales, strict=True))
        return {name: plane for name, plane in planes.items() if plane is not None} | self.factors

    def of_operator(self) -> dict[str, Any]:
        """Return the options of the operator itself: factors are tensors, and planes have names of their own."""
        named = {f"{name}_cache" if is_plane(each) else name: each for name, each in self.options.items()}
        return {name: per_head(each) if name.endswith(("y_scale", "e_scale")) else each for name, each in named.items()}

    def equal(self, other: Caches) -> bool:
        pairs = zip(self.codes + self.scales, other.codes + other.scales, strict=True)
        return all(a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def is_plane(scale: Any) -> bool:
    return isinstance(scale, torch.Tensor) and scale.ndim == 4


def per_head(factor: Any) -> Any:
    return torch.full((HEADS,), factor) if isinstance(factor, float) else factor


def caches(format: str) -> Caches:
    kind = FORMATS[format]
    shape = BLOCKS, SIZE, HEADS
    codes = [torch.full((*shape, kind.row_codes(DIM)), 255, dtype=torch.uint8) for _ in range(2)]
    scales: list[Any] = [None, None]
    if kind.scale_dtype is not None:
        size = kind.row_scales(DIM) * kind.scale_dtype.itemsize
        planes = [torch.full((*shape, size), 255, dtype=torch.uint8) for _ in range(2)]
        scales = [plane.view(getattr(torch, str(kind.scale_dtype))) for plane in planes]
    suffix = "scale" if kind.scale_dtype is None else "global_scale"
    factors = {f"key_{suffix}": 0.37, f"value_{suffix}": 0.5} if kind.takes_factor else {}
    return Caches([each.view(getattr(torch, str(kind.dtype))) for each in codes], scales, factors)


def step() -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(3)
    heads = (HEADS, HEADS, QUERY_HEADS)
    key, value, query = (torch.randn(TOKENS, each, DIM, generator=generator).bfloat16() for each in heads)
    return key, value, query, torch.tensor([12, 13, 14, 15, 8, 4, -1])


def where() -> dict[str, Any]:
    return {
        "block_table": torch.tensor([[3, 2], [1, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 1], dtype=torch.int32),
        "cu_query_lens": torch.tensor([0, 5, 6], dtype=torch.int32),
    }


@EVERY_FORMAT
def test_operators_over_codes_pass_opcheck(format):
    key, value, query, slots = step()
    stored = caches(format)
    options = stored.of_operator()
    mutated = [*stored.codes, *(plane for plane in stored.scales if plane is not None)]
    # The other checks of opcheck compare mutated arguments by arithmetic, which torch has not for float8.
    has_float8 = any(each.is_floating_point() and each.itemsize == 1 for each in mutated)
    checks = {"test_utils": ("test_autograd_registration", "test_faketensor")} if has_float8 else {}
    operator = torch.ops.pagecore.write_kv.default
    torch.library.opcheck(operator, (key, value, *stored.codes, slots), options, **checks)
    interop.write_kv(key, value, *stored.codes, slots, **stored.options)
    read = {name.removesuffix("_cache"): each for name, each in options.items()}
    lengths = where()
    arrays = query, *stored.codes, lengths.pop("block_table"), lengths.pop("seq_lens")
    torch.library.opcheck(torch.ops.pagecore.paged_attention.default, arrays, lengths | read, **checks)


@EVERY_FORMAT
def test_codes_scales_and_attention_equal_those_of_pagecore(format):
    key, value, query, slots = step()
    ours, theirs = caches(format), caches(format)
    interop.write_kv(key, value, *ours.codes, slots, **ours.options, format=format)
    ops.write_kv(key, value, *theirs.codes, slots, **theirs.options)
    assert ours.equal(theirs)
    out, lse = interop.paged_attention(query, *ours.codes, **where(), **ours.options, return_lse=True)
    expected, expected_lse = ops.paged_attention(query, *theirs.codes, **where(), **theirs.options, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("format", "backend"), [*in_turn(["float8_e4m3fn", "int8_token", "nvfp4"], over=[BACKENDS]), ("nvfp4", BACKENDS[1])]
)
def test_a_full_graph_writes_codes_and_scales_in_place(format, backend):
    lengths = where()

    def layer(key, value, query, slots, stored):
        interop.write_kv(key, value, *stored.codes, slots, **stored.options)
        return interop.paged_attention(query, *stored.codes, **lengths, **stored.options)

    torch._dynamo.reset()
    eager, compiled = caches(format), caches(format)
    key, value, query, slots = step()
    with torch.inference_mode():
        expected = layer(key, value, query, slots, eager)
        attended = compile_whole(layer, backend)(key, value, query, slots, compiled)
    assert eager.equal(compiled)
    assert torch.equal(attended, expected)


def test_bounds_and_labels_are_written_and_blocks_selected():
    key, value, query, slots = step()
    cache = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM, dtype=torch.bfloat16)
    summaries = {
        "key_min": torch.zeros(BLOCKS, HEADS, DIM),
        "key_max": torch.zeros(BLOCKS, HEADS, DIM),
        "label": torch.zeros(BLOCKS, SIZE, HEADS, 8, dtype=torch.bfloat16),
    }
    channels = torch.arange(16, dtype=torch.int32).reshape(HEADS, 8)
    operator = torch.ops.pagecore.write_kv.default
    given = summaries | {"label_channels": channels}
    torch.library.opcheck(operator, (key, value, *cache, slots), given)
    interop.write_kv(key, value, *cache, slots, **given)
    assert torch.equal(summaries["key_max"][3], key[:4].float().amax(0))
    assert torch.equal(summaries["label"][3, 2, 1], key[2, 1, 8:16])
    lengths = where()
    blocks = torch.tensor([[[1], [0]], [[0], [0]]], dtype=torch.int32)
    chosen = interop.paged_attention(query, *cache, **lengths, blocks=blocks)
    expected = ops.paged_attention(query, *cache, **lengths, blocks=blocks)
    assert torch.equal(chosen, expected)
    # Head 0 of the first sequence reads its second block, which holds the fifth token alone.
    np.testing.assert_allclose(chosen[4, 0].float(), value[4, 0].float(), rtol=1e-2)


def test_a_factor_and_a_plane_of_one_cache_are_refused():
    key, value, _, slots = step()
    stored = caches("int8_token")
    before = stored.clone()
    with pytest.raises(UnsupportedOption, match=r"key_scale and key_scale_cache are both given.*pass one"):
        torch.ops.pagecore.write_kv.default(
            key, value, *stored.codes, slots, key_scale=torch.ones(HEADS), key_scale_cache=stored.scales[0]
        )
    with pytest.raises(PagecoreError, match="value_cache is int8"):
        interop.write_kv(key, value, *stored.codes, slots, key_scale=stored.scales[0])
    assert stored.equal(before)


def test_meta_tensors_of_codes_give_the_shape_of_the_numbers():
    key, value, query, slots = (each.to("meta") for each in step())
    stored = caches("nvfp4")
    codes = [each.to("meta") for each in stored.codes]
    planes = {"key_scale": stored.scales[0].to("meta"), "value_scale": stored.scales[1].to("meta")}
    interop.write_kv(key, value, *codes, slots, **planes)
    lengths = {name: each.to("meta") for name, each in where().items()}
    assert interop.paged_attention(query, *codes, **lengths, **planes).shape == (TOKENS, QUERY_HEADS, DIM)
