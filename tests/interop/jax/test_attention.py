"""paged_attention under jax.jit, compared with the float64 oracle and bit for bit with calls outside of JAX."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore.errors import PagecoreError
from tests.interop.jax.on_jax import attend, check, laid_out
from tests.ops import test_attention_options as on_host
from tests.ops.cases import DTYPES, Shape, assert_output_close, make_case, random_mask
from tests.ops.trees import tree_case

LENS = {"seq_lens": (70, 33, 1, 16), "query_lens": (7, 1, 1, 16)}
DECODE = {"seq_lens": (70, 33, 1, 150)}
BATCHES = pytest.mark.parametrize("lens", [LENS, DECODE], ids=["mixed", "decode"])
SHARED = ["not causal", "scale", "window", "softcap", "sinks", "alibi", "key scale", "scales by head", "all"]
OPTIONS = {
    "none": {},
    "chunk": {"chunk": 16},
    "sink tokens": {"window": 9, "sink_tokens": 3},
    "two sides": {"window": (5, 7), "causal": False},
    "one side": {"window": (None, 3), "causal": False},
    **{name: on_host.OPTIONS[name] for name in SHARED},
}


@BATCHES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_equals_the_oracle(jax, interop, lens, options):
    check(jax, interop, make_case(Shape(**lens), **options))


@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_dtype_and_layout_equals_the_oracle(jax, interop, query_dtype, cache_dtype, layout):
    shape = Shape(query_dtype=query_dtype, cache_dtype=cache_dtype, layout=layout, dims=(64, 48), **LENS)
    check(jax, interop, make_case(shape, window=40, softcap=20.0, sinks=on_host.SINKS), layout)


@BATCHES
def test_masks(jax, interop, lens):
    shape = Shape(**lens)
    check(jax, interop, make_case(shape, mask=random_mask(shape)))


@BATCHES
def test_rows_of_a_larger_table_and_padding(jax, interop, lens):
    shape = Shape(shuffle_rows=True, padding=5 if "query_lens" in lens else 0, **lens)
    check(jax, interop, make_case(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_slopes_have_any_float_dtype(jax, interop, dtype):
    options = {"sinks": on_host.SINKS.astype(DTYPES[dtype]), "alibi_slopes": on_host.SLOPES.astype(DTYPES[dtype])}
    check(jax, interop, make_case(Shape(**LENS), **options))


@pytest.mark.parametrize(
    "shape", [Shape(seq_lens=()), Shape(seq_lens=(5, 0), query_lens=(0, 0))], ids=["no sequences", "no queries"]
)
def test_an_empty_batch_gives_empty_arrays(jax, interop, shape):
    out, lse = attend(jax, interop, make_case(shape))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_indices_are_int64_under_x64(jax, interop):
    case = make_case(Shape(index_dtype="int64", shuffle_rows=True, **LENS))
    with jax.enable_x64(True):
        text = jax.jit(lambda *a: interop.paged_attention(*a, **case.options)).lower(*case.arrays).as_text()
        assert "xi64>" in text
        check(jax, interop, case)


def test_int64_indices_become_int32_without_x64(jax, interop):
    check(jax, interop, make_case(Shape(index_dtype="int64", **DECODE)))


def test_lists_and_narrow_integers_are_accepted_as_indices(jax, interop):
    case = make_case(Shape(seq_lens=(20, 3)), seed=3)
    call = jax.jit(lambda q, k, v, t: interop.paged_attention(q, k, v, t, [20, 3], cu_query_lens=[0, 1, 2]))
    table = np.where(case.block_table > 100, 0, case.block_table).astype(np.int8)
    out = call(case.query, case.key_cache, case.value_cache, table)
    assert np.asarray(out).tobytes() == case.run().tobytes()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_layer_of_stacked_caches_is_read_in_place(jax, interop, layout):
    case = make_case(Shape(layout=layout, **LENS))
    rng = np.random.default_rng(1)
    layers = [[rng.standard_normal(case.key_cache.shape).astype(np.float32) for _ in range(2)] for _ in range(3)]
    stacks = [np.stack([laid_out(layer[i], layout) for layer in layers]) for i in range(2)]
    table = np.where(np.abs(case.block_table) > 100, 0, case.block_table)

    def one(query, keys, values, layer):
        return interop.paged_attention(
            query, keys, values, table, case.seq_lens, **case.options, layer=layer, layout=layout
        )

    @jax.jit
    def scan(query, keys, values):
        return jax.lax.scan(lambda _, layer: (_, one(query, keys, values, layer)), None, np.arange(3))[1]

    out = scan(case.query, *stacks)
    for i, layer in enumerate(layers):
        case.key_cache, case.value_cache = (
            laid_out(cache, layout).swapaxes(1, 2) if layout == "HND" else cache for cache in layer
        )
        case.block_table = table
        expected = case.run().tobytes()
        assert np.asarray(out[i]).tobytes() == expected
        known = jax.jit(lambda *arrays, i=i: one(*arrays, i))(case.query, *stacks)
        assert np.asarray(known).tobytes() == expected


def test_a_call_outside_of_jit(jax, interop):
    case = make_case(Shape(**DECODE))
    arrays = [jax.numpy.asarray(array) for array in case.arrays]
    assert np.asarray(interop.paged_attention(*arrays)).tobytes() == case.run().tobytes()


def test_denormal_numbers_are_not_flushed(jax, interop):
    """XLA's threads flush denormal numbers to 0; the handlers must not."""
    case = make_case(Shape(query_dtype="float32", cache_dtype="float32", **DECODE))
    case.value_cache *= np.float32(1e-40)
    out, _ = attend(jax, interop, case)
    assert np.any(out != 0)
    assert out.tobytes() == case.run().tobytes()


def test_scales_may_be_traced(jax, interop):
    case = make_case(Shape(**DECODE), key_scale=0.37, value_scale=[2.0, 0.5])
    keys, values = (jax.numpy.asarray(cache) for cache in (case.key_cache, case.value_cache))

    @jax.jit
    def call(key_scale, value_scale):
        return interop.paged_attention(
            case.query, keys, values, case.block_table, case.seq_lens, key_scale=key_scale, value_scale=value_scale
        )

    out = call(np.float32(0.37), np.asarray([2.0, 0.5], np.float32))
    assert np.asarray(out).tobytes() == case.run().tobytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_call_gives_equal_bits_on_any_number_of_threads(jax, interop, threads):
    import pagecore

    case = make_case(Shape(seq_lens=(900, 2000), query_lens=(300, 200)))
    before = pagecore.num_threads()
    try:
        pagecore.set_num_threads(threads)
        check(jax, interop, case)
    finally:
        pagecore.set_num_threads(before)


@pytest.mark.parametrize("words", [1, 2])
def test_trees(jax, interop, words):
    """Traced arrays hold halves of words, because JAX has 64-bit integers under x64 only."""
    case = tree_case(Shape(**LENS), words=words, window=5)
    expected, bits = case.expect()[0], case.options["tree_mask"]
    halves = bits.view(np.uint32).reshape(len(bits), -1)
    options = {name: case.options[name] for name in ("cu_query_lens",)}

    @jax.jit
    def call(operands, options, tree):
        return interop.paged_attention(*operands, **options, window=5, tree_mask=tree)

    assert_output_close(np.asarray(call(case.arrays, options, halves)), expected)
    eager = interop.paged_attention(*map(jax.numpy.asarray, case.arrays), **options, window=5, tree_mask=bits)
    assert_output_close(np.asarray(eager), expected)
    assert np.asarray(eager).tobytes() == case.run().tobytes()


@pytest.mark.parametrize("dtype", [int, np.uint64, np.int64])
def test_a_list_of_words_may_have_bit_63(jax, interop, dtype):
    case = make_case(Shape(seq_lens=(70,), query_lens=(64,)))
    words = np.array([(1 << i + 1) - 1 for i in range(64)], np.uint64)
    listed = list(words.view(np.int64)) if dtype is np.int64 else [dtype(word) for word in words.tolist()]
    arrays = [*map(jax.numpy.asarray, case.arrays)]
    got = interop.paged_attention(*arrays, **case.options, tree_mask=listed)
    assert np.asarray(got).tobytes() == case.run(tree_mask=words).tobytes()


def test_a_list_of_uint32_holds_words_of_64_bits_as_on_the_host(jax, interop):
    case = make_case(Shape(seq_lens=(9,), query_lens=(4,)))
    rows = [[np.uint32(1 << i)] for i in range(4)]
    got = interop.paged_attention(*map(jax.numpy.asarray, case.arrays), **case.options, tree_mask=rows)
    assert np.asarray(got).tobytes() == case.run(tree_mask=rows).tobytes()


@pytest.mark.parametrize("tree", [np.zeros(0, np.uint64), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.uint32), []])
def test_a_tree_without_tokens(jax, interop, tree):
    cache, zeros = jax.numpy.zeros((3, 4, 1, 8)), jax.numpy.zeros(2, np.int32)
    arrays = (jax.numpy.zeros((0, 2, 8)), cache, cache, jax.numpy.ones((1, 1), np.int32), zeros[:1])
    assert interop.paged_attention(*arrays, cu_query_lens=zeros, tree_mask=tree).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_mask": np.ones((25, 3), np.uint32)}, "an even number of halves"),
        ({"tree_mask": np.ones((24, 2), np.uint32)}, "tree_mask has shape"),
        ({"tree_mask": np.ones((25, 2), np.float32)}, "tree_mask is float32"),
        ({"tree_mask": np.ones((25, 1, 1), np.uint64)}, r"it must be \[num_tokens\] or \[num_tokens, words\]"),
        ({"tree_mask": np.uint64(1)}, r"it must be \[num_tokens\] or \[num_tokens, words\]"),
        ({"tree_mask": [[1], [1, 2]]}, "tree_mask is not an array of integers"),
        ({"tree_mask": [1, 1.5]}, "tree_mask holds 1.5"),
        ({"tree_mask": np.ones(25, np.uint64), "mask": np.ones(9, bool)}, "both given"),
        ({"positions": np.ones(25, np.int32)}, "pass tree_mask too"),
    ],
)
def test_trees_that_are_refused(jax, interop, options, message):
    case = make_case(Shape(**LENS))
    with pytest.raises(PagecoreError, match=message):
        interop.paged_attention(*map(jax.numpy.asarray, case.arrays), **case.options, **options)
