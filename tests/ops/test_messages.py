"""Messages for common mistakes name the invalid argument and the remedy."""

from __future__ import annotations

import re

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache, ops
from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype


def f32(*shape: int):
    return np.ones(shape, np.float32)


@pytest.fixture
def step():
    """A cache of 2 heads for 4 query heads, and a step of 5 tokens."""
    cache = PagedKVCache(AttentionSpec(2, 8, dtype="float32", num_query_heads=4), num_layers=1, num_blocks=8)
    return cache, cache.prepare([cache.add_sequence(range(5))], 5)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.int16, np.uint64])
@pytest.mark.parametrize("name", ["key", "value", "query"])
def test_errors_of_unsupported_dtypes_name_the_supported_ones(step, name, dtype):
    cache, batch = step
    given = {"key": f32(5, 2, 8), "value": f32(5, 2, 8), "query": f32(5, 4, 8)}
    given[name] = given[name].astype(dtype)
    calls = {
        "query": lambda: cache.attend(0, given["query"], batch),
        "key": lambda: cache.write(0, given["key"], given["value"], batch),
        "value": lambda: cache.write(0, given["key"], given["value"], batch),
    }
    with pytest.raises(UnsupportedDtype) as refused:
        calls[name]()
    kind = np.dtype(dtype).name
    taken = "float32, float16, bfloat16, float8_e4m3fn and float8_e5m2"
    if name != "query":
        taken = "float32, float16 and bfloat16"
    assert str(refused.value) == f"{name} is {kind}; {taken} are supported: convert it"


@pytest.mark.parametrize("heads", [2, 8])
def test_a_wrong_number_of_query_heads_names_the_query(step, heads):
    cache, batch = step
    expected = f"query has shape (5, {heads}, 8) and so {heads} heads; the batch is planned for 4 query heads"
    with pytest.raises(ShapeError, match="^" + re.escape(expected)):
        cache.attend(0, f32(5, heads, 8), batch)


def test_a_plan_for_other_key_heads_names_the_caches():
    plan = ops.plan_attention([0, 5], [5], num_query_heads=4, num_kv_heads=4)
    with pytest.raises(ShapeError, match="the caches have 2 heads and the batch is planned for 4; make a plan for"):
        ops.paged_attention(
            f32(5, 4, 8), f32(3, 4, 2, 8), f32(3, 4, 2, 8), [[1, 2]], [5], cu_query_lens=[0, 5], plan=plan
        )


@pytest.mark.parametrize(("heads", "tokens"), [(4, 5), (4, 6), (4, 2)])
def test_errors_of_a_query_with_heads_first_name_the_layout(heads, tokens):
    cache = PagedKVCache(AttentionSpec(2, 8, dtype="float32", num_query_heads=heads), num_layers=1, num_blocks=8)
    batch = cache.prepare([cache.add_sequence(range(tokens))], tokens)
    hint = (
        r"query is \[num_tokens, num_query_heads, head_dim\].*pass query.transpose\(1, 0, 2\) if its heads come first"
    )
    with pytest.raises(ShapeError, match=hint):
        cache.attend(0, f32(heads, tokens, 8), batch)
    with pytest.raises(ShapeError, match=hint):
        ops.paged_attention(f32(heads, 3, 8), f32(3, 4, 2, 8), f32(3, 4, 2, 8), [[1, 2]] * 3, [5] * 3)
    with pytest.raises(ShapeError, match=r"query has 4 rows.*query is \[num_tokens, num_query_heads, head_dim\]"):
        ops.paged_attention(f32(4, 6, 8), f32(3, 4, 2, 8), f32(3, 4, 2, 8), [[1, 2]], [6], cu_query_lens=[0, 6])


@pytest.mark.parametrize("name", ["key", "value"])
def test_errors_of_keys_with_heads_first_name_the_layout(name):
    given = {"key": f32(5, 2, 8), "value": f32(5, 2, 8)}
    given[name] = f32(2, 5, 8)
    if name == "value":
        given["key"], given["value"] = f32(2, 2, 8), f32(2, 5, 8)
    with pytest.raises(ShapeError, match=rf"{name} has shape \(2, 5, 8\).*pass {name}.transpose\(1, 0, 2\)|value has"):
        ops.write_kv(**given, key_cache=f32(3, 4, 2, 8), value_cache=f32(3, 4, 2, 8), slot_mapping=[4, 5])


def test_errors_of_a_cache_with_heads_before_tokens_name_the_layout():
    cache = f32(3, 2, 16, 8)  # [num_blocks, num_kv_heads, block_size, head_dim]
    with pytest.raises(ShapeError, match=r"query has 8 heads and key_cache 16; .* pass key_cache\.swapaxes\(1, 2\)"):
        ops.paged_attention(f32(1, 8, 8), cache, cache, [[1, 2]], [20])
    view = cache.swapaxes(1, 2)
    assert ops.paged_attention(f32(1, 8, 8), view, view, [[1, 2]], [20]).shape == (1, 8, 8)


class WithoutAttributes:
    """An object whose attributes raise."""

    def __getattr__(self, name):
        raise ZeroDivisionError("no attributes")


MANY_AXES = np.ones((1,) * 13, int).tolist()  # a tensor has at most 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chunk", {"chunk": np.array([1, 2])}),
        ("sink_tokens", {"window": 2, "sink_tokens": np.array([1, 2])}),
        ("window", {"window": (np.array([1, 2]), 0)}),
        ("sinks", {"sinks": MANY_AXES}),
        ("value_scale", {"value_scale": MANY_AXES}),
        ("seq_lens", {"seq_lens": MANY_AXES}),
        ("tree_mask", {"tree_mask": WithoutAttributes()}),
    ],
)
def test_errors_of_unreadable_arguments_name_them(name, options):
    call = {"block_table": [[1, 2]], "seq_lens": [5]} | options
    with pytest.raises(PagecoreError, match=f"^{name}(:| is) "):
        ops.paged_attention(f32(1, 4, 8), f32(3, 4, 2, 8), f32(3, 4, 2, 8), **call)


def test_parents_that_cannot_be_read_are_refused():
    with pytest.raises(ShapeError, match="parents is not an array of integers"):
        pagecore.tree_mask([WithoutAttributes()])


def test_an_output_of_another_dtype_names_out():
    with pytest.raises(UnsupportedDtype, match="out is int8; use float32, bfloat16 or float16"):
        pagecore.gather_latent(f32(3, 4, 8), None, [[1, 2]], [5], out=np.ones((5, 8), np.int8))
