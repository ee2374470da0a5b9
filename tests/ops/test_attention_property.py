"""paged_attention on batches, shapes and options that Hypothesis makes up, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import ops
from tests.ops.cases import DTYPES, LAYOUTS, Shape, make_case, random_mask

sides = st.one_of(st.none(), st.just(-1), st.integers(0, 60))
windows = st.one_of(st.none(), st.integers(1, 100), st.tuples(sides, sides))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    lens = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 24)), max_size=5))
    group, num_kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    dims = st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128]))
    return Shape(
        seq_lens=[seq_len for seq_len, _ in lens],
        query_lens=draw(st.sampled_from([None, [query_len for _, query_len in lens]])),
        heads=(group * num_kv_heads, num_kv_heads),
        dims=(draw(dims), draw(dims)),
        block_size=draw(st.integers(1, 40)),
        query_dtype=draw(st.sampled_from(list(DTYPES))),
        cache_dtype=draw(st.sampled_from(list(DTYPES))),
        layout=draw(st.sampled_from(LAYOUTS)),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        shuffle_rows=draw(st.booleans()),
    )


@st.composite
def options(draw: st.DrawFn, shape: Shape) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    num_heads, num_kv_heads = shape.heads
    chosen: dict[str, Any] = {"causal": draw(st.booleans()), "window": draw(windows)}
    extras = {
        "scale": lambda: draw(st.floats(-0.5, 0.5)),
        "softcap": lambda: draw(st.sampled_from([0.0, 1.0, 30.0, 50.0])),
        "sinks": lambda: rng.standard_normal(num_heads) * 3,
        "alibi_slopes": lambda: (2.0 ** -rng.integers(1, 9, num_heads)).astype(np.float32),
        "key_scale": lambda: rng.uniform(0.1, 2, num_kv_heads).astype(np.float32),
        "value_scale": lambda: float(np.float32(rng.uniform(0.1, 2))),
        "mask": lambda: random_mask(shape, density=rng.uniform()),
    }
    for name in draw(st.sets(st.sampled_from(list(extras)))):
        chosen[name] = extras[name]()
    return chosen


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_batch_with_any_options_keeps_the_bounds(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    chosen = data.draw(options(shape))
    seed = data.draw(st.integers(0, 2**20))
    case = make_case(shape, seed=seed, **chosen)
    if data.draw(st.booleans()):
        plan = ops.plan_attention(
            case.options.get("cu_query_lens"),
            case.seq_lens,
            num_query_heads=shape.heads[0],
            num_kv_heads=shape.heads[1],
            causal=chosen["causal"],
            window=chosen["window"],
            batch_invariant=data.draw(st.booleans()),
            num_workers=data.draw(st.sampled_from([None, 1, 3, 64])),
        )
        case.check(plan=plan)
    else:
        case.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_write_kv_writes_is_what_attention_reads(data: st.DataObject) -> None:
    """Tokens go in over random slots in several calls, and come out as dense attention over them."""
    block_size, num_tokens = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 60))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    width = -(-num_tokens // block_size)
    table = rng.permutation(np.arange(1, width + 3))[None, :width]
    slots = (table[0][:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_tokens]
    key, value = rng.standard_normal((2, num_tokens, 2, 16)).astype(np.float32).astype(DTYPES[dtype])
    caches = np.full((2, width + 3, block_size, 2, 16), np.nan, DTYPES[dtype])
    cut = data.draw(st.integers(0, num_tokens))
    for part in (slice(cut, None), slice(None, cut)):
        ops.write_kv(key[part], value[part], *caches, slots[part])
    query = rng.standard_normal((1, 4, 16)).astype(np.float32)
    dense = ops.paged_attention(query, key[None], value[None], [[0]], [num_tokens])
    paged = ops.paged_attention(query, *caches, table, [num_tokens])
    np.testing.assert_allclose(paged, dense, rtol=1e-5, atol=1e-6)
