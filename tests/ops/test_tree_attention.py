"""paged_attention with tree_mask: the new tokens of a sequence are a tree; against float64 on every instruction set."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import ShapeError, UnsupportedDtype, UnsupportedOption, paged_attention, plan_attention
from pagecore.ops import tree_mask
from tests.ops.cases import Shape, make_case
from tests.ops.instruction_sets import on_every_isa
from tests.ops.trees import tree_case
from tests.reference.trees import bits_of, depths_of, random_parents, words_of
from tests.together import together

BRANCHES = Shape(seq_lens=(300, 77, 20, 5, 130, 64), query_lens=(40, 64, 20, 1, 6, 33), heads=(8, 2))
SLOPES = (2.0 ** -np.arange(1, 9)).astype(np.float32)
OPTIONS = {
    "alone": {},
    "window": {"window": 33},
    "narrow window": {"window": 3},
    "window of one": {"window": 1},
    "chunk": {"chunk": 32},
    "narrow chunk": {"chunk": 4},
    "both sides": {"causal": False, "window": (10, 2)},
    "not causal": {"causal": False},
    "alibi": {"alibi_slopes": SLOPES},
    "negative alibi": {"alibi_slopes": -SLOPES, "window": 7},
    "everything": {
        "window": 20,
        "alibi_slopes": SLOPES,
        "softcap": 5.0,
        "sinks": np.linspace(-2, 3, 8, dtype=np.float32),
    },
}


@pytest.mark.slow
@together("name", OPTIONS)
@on_every_isa
def test_trees_keep_the_bounds_with_every_option(name):
    tree_case(BRANCHES, **OPTIONS[name]).check()


@pytest.mark.slow
@together("dims", [(64, 64), (80, 80), (128, 64), (36, 20)])
@together("dtype", ["float32", "float16", "bfloat16"])
@on_every_isa
def test_trees_in_every_dtype(dtype, dims):
    shape = replace(BRANCHES, dims=dims, query_dtype=dtype, cache_dtype=dtype, padding=3, shuffle_rows=True)
    tree_case(shape, window=50).check()


@together("words", [1, 2, 3])
@together("query_lens", [(3, 5), (1, 1), (2, 64), (63, 17)])
@on_every_isa
def test_few_and_many_rows(query_lens, words):
    """Few rows of queries read keys in place; many rows pack them."""
    shape = Shape(
        seq_lens=(200, 70), query_lens=query_lens, heads=(2, 2), query_dtype="bfloat16", cache_dtype="bfloat16"
    )
    tree_case(shape, words=words, window=11).check()


@on_every_isa
def test_trees_of_more_than_64_tokens():
    shape = Shape(seq_lens=(400, 150, 131), query_lens=(130, 150, 65), heads=(4, 2))
    tree_case(shape, branching=0.1).check()
    tree_case(shape, branching=0.05, window=25, alibi_slopes=SLOPES[:4]).check()


@pytest.mark.slow
@together("invariant", [False, True])
@together("window", [None, 30])
@on_every_isa
def test_plans(window, invariant):
    case = tree_case(replace(BRANCHES, seq_lens=(3000, 77, 20, 5, 1500, 64)), window=window)
    heads = {"num_query_heads": 8, "num_kv_heads": 2}
    plan = plan_attention(
        case.options["cu_query_lens"], case.seq_lens, window=window, tree=True, batch_invariant=invariant,
        num_workers=3, **heads
    )  # fmt: skip
    assert plan.tree
    case.check(plan=plan)
    if window is None:
        case.check(plan=plan_attention(case.options["cu_query_lens"], case.seq_lens, num_workers=3, **heads))


def test_a_window_needs_a_plan_for_trees():
    case = tree_case(BRANCHES, window=30)
    plan = plan_attention(case.options["cu_query_lens"], case.seq_lens, window=30, num_query_heads=8, num_kv_heads=2)
    with pytest.raises(ShapeError, match="without tree; call plan_attention with tree=True"):
        case.run(plan=plan)


@on_every_isa
def test_rows_of_an_invariant_tree_have_the_same_bits_beside_any_others():
    case = tree_case(BRANCHES)
    heads = {"num_query_heads": 8, "num_kv_heads": 2, "batch_invariant": True}
    cu = case.options["cu_query_lens"]
    out = case.run(plan=plan_attention(cu, case.seq_lens, **heads))
    for i in range(len(cu) - 1):
        rows = slice(cu[i], cu[i + 1])
        one = paged_attention(
            case.query[rows], case.key_cache, case.value_cache, case.block_table[i : i + 1], case.seq_lens[i : i + 1],
            cu_query_lens=[0, cu[i + 1] - cu[i]], tree_mask=case.options["tree_mask"][rows],
            plan=plan_attention([0, cu[i + 1] - cu[i]], case.seq_lens[i : i + 1], **heads),
        )  # fmt: skip
        np.testing.assert_array_equal(one, out[rows])


@on_every_isa
def test_a_chain_equals_causal_attention():
    case = make_case(BRANCHES)
    chain = [tree_mask(np.arange(count) - 1) for count in BRANCHES.query_lens]
    np.testing.assert_allclose(case.run(tree_mask=np.concatenate(chain)), case.run(), rtol=2e-6, atol=2e-6)


@on_every_isa
def test_a_tree_equals_its_flat_mask():
    case = tree_case(BRANCHES)
    bits, parts, first = case.options.pop("tree_mask"), [], 0
    for length, count in zip(BRANCHES.seq_lens, BRANCHES.query_lens, strict=True):
        part = np.ones((count, length), bool)
        rows = bits[first : first + count, None] >> np.arange(count, dtype=np.uint64)
        part[:, length - count :] = rows & np.uint64(1)
        parts.append(part.ravel())
        first += count
    np.testing.assert_allclose(case.run(tree_mask=bits), case.run(mask=np.concatenate(parts)), rtol=2e-6, atol=2e-6)


@together("bad", [np.nan, np.inf])
@on_every_isa
def test_a_branch_does_not_see_the_values_of_another(bad):
    shape = Shape(seq_lens=(70,), query_lens=(6,), heads=(4, 2), query_dtype="bfloat16", cache_dtype="bfloat16")
    case = tree_case(shape)
    case.options["tree_mask"] = tree_mask([-1, 0, 0, 1, 1, 2])
    block, offset = case.block_table[0, 66 // 16], 66 % 16  # token 2 of the tree, an ancestor of token 5 alone
    case.value_cache[block, offset] = bad
    out = case.run()
    finite = np.isfinite(out.astype(np.float32)).all(axis=(1, 2))
    assert finite.tolist() == [True, True, False, True, True, False]


@on_every_isa
def test_positions_are_those_of_the_tree_by_default():
    case = tree_case(BRANCHES, window=9, alibi_slopes=SLOPES)
    bases = np.repeat(np.subtract(BRANCHES.seq_lens, BRANCHES.query_lens), BRANCHES.query_lens)
    bits = case.options["tree_mask"]
    positions = bases + [int(row).bit_count() - 1 for row in bits]
    np.testing.assert_array_equal(case.run(positions=positions.astype(np.int32)), case.run())


@on_every_isa
def test_given_positions():
    """Without a tree of one root, positions are the caller's: here every token sits at the place of its slot."""
    case = tree_case(BRANCHES, window=40)
    bases = np.repeat(np.subtract(BRANCHES.seq_lens, BRANCHES.query_lens), BRANCHES.query_lens)
    case.options["positions"] = bases + np.concatenate([np.arange(n) for n in BRANCHES.query_lens])
    case.check()


@pytest.mark.parametrize("window", [None, 3, (5, None)])
@on_every_isa
def test_an_ancestor_may_have_a_position_below_0(window):
    """Every token of a sequence without history has position 0, and its k-th ancestor position -k."""
    case = tree_case(Shape(seq_lens=[9, 30], query_lens=[9, 30], dims=(32, 32)), window=window, branching=0.2)
    case.options["positions"] = np.zeros(39, np.int32)
    case.check()


def test_signed_and_unsigned_bits_and_lists_are_the_same():
    case = tree_case(BRANCHES)
    bits = case.options.pop("tree_mask")
    expected = case.run(tree_mask=bits)
    for same in (bits.view(np.int64), bits.tolist(), bits.view(np.int64).tolist(), bits[:, None],
                 np.stack([bits, bits], axis=1)[:, 0]):  # fmt: skip
        np.testing.assert_array_equal(case.run(tree_mask=same), expected)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_trees_and_windows(data):
    counts = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    lens = [count + data.draw(st.integers(0, 150)) for count in counts]
    window = data.draw(st.none() | st.integers(1, 90))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    heads = data.draw(st.sampled_from([(1, 1), (4, 2), (12, 3)]))
    shape = Shape(
        seq_lens=lens, query_lens=counts, heads=heads, dims=(32, 32), query_dtype=dtype, cache_dtype=dtype,
        block_size=data.draw(st.sampled_from([1, 5, 16])),
    )  # fmt: skip
    tree_case(shape, seed=data.draw(st.integers(0, 99)), window=window, branching=data.draw(st.floats(0, 1))).check()


def test_worked_example_f2_bits_and_positions():
    parents = [-1, 0, 0, 1, 1, 2]
    assert tree_mask(parents).tolist() == [1, 3, 5, 11, 19, 37]
    assert tree_mask(parents).dtype == np.uint64
    assert bits_of(parents) == [1, 3, 5, 11, 19, 37]
    assert depths_of(parents) == [0, 1, 1, 2, 2, 2]


@together("count", [0, 1, 63, 64, 65, 200])
def test_tree_mask_against_the_plain_twin(count):
    parents = random_parents(np.random.default_rng(count), count)
    words = max(1, -(-count // 64))
    expected = words_of(bits_of(parents), words)
    np.testing.assert_array_equal(tree_mask(parents), expected[:, 0] if words == 1 else expected)
    np.testing.assert_array_equal(tree_mask(parents, words=words + 1), words_of(bits_of(parents), words + 1))


def test_tree_mask_of_several_sequences():
    assert tree_mask([[-1, 0], [], [-1, -1, 0]]).tolist() == [1, 3, 1, 2, 5]


@together(
    ("parents", "words", "message"),
    [
        ([-1, 1], None, r"parents\[1\] is 1; a parent is an earlier token, 0 to 0, or -1"),
        ([0], None, r"parents\[0\] is 0; the first token has no parent among them: use -1"),
        ([-1, -2], None, r"parents\[1\] is -2"),
        ([-1] * 65, 1, "words is 1; the longest sequence needs 2"),
    ],
)
def test_parents_that_are_refused(parents, words, message):
    with pytest.raises(ShapeError, match=message):
        tree_mask(parents, words=words)


def broken(case, token, bits):
    mask = case.options["tree_mask"].copy()
    mask[token] = bits
    return mask


@together(
    ("change", "error", "message"),
    [
        (lambda c: {"tree_mask": c.options["tree_mask"][:-1]}, ShapeError, "tree_mask has shape .163,.; axis 0"),
        (lambda c: {"tree_mask": broken(c, 41, 1)}, ShapeError, r"tree_mask\[41\] lacks bit 1, that of the token"),
        (lambda c: {"tree_mask": broken(c, 40, 0)}, ShapeError, r"tree_mask\[40\] lacks bit 0"),
        (lambda c: {"tree_mask": broken(c, 0, 1 | 1 << 40)}, ShapeError, r"has bit 40 and sequence 0 has 40"),
        (lambda c: {"tree_mask": broken(c, 0, 3)}, ShapeError, r"tree_mask\[0\] has bit 1 and is the row of token 0"),
        (lambda c: {"mask": np.ones(3, bool)}, UnsupportedOption, "mask and tree_mask are both given; use one"),
        (lambda c: {"indices": np.zeros((6, 2, 1), np.int32)}, UnsupportedOption, "a selection of keys are both given"),
        (lambda c: {"tree_mask": np.ones(164, np.float32)}, UnsupportedDtype, "tree_mask is float32"),
        (lambda c: {"tree_mask": [1, 1.5]}, UnsupportedDtype, "tree_mask holds 1.5; it must hold integers"),
        (lambda c: {"tree_mask": [[1], [np.float32(2)]]}, UnsupportedDtype, "tree_mask holds .*2.0"),
        (lambda c: {"tree_mask": [1, "1"]}, UnsupportedDtype, "tree_mask holds '1'"),
        (lambda c: {"tree_mask": [[1], [1, 2]]}, ShapeError, "tree_mask is not an array of integers"),
        (lambda c: {"tree_mask": [-1, 2**63]}, ShapeError, "tree_mask is not an array of integers"),
        (lambda c: {"tree_mask": np.ones(164, np.int32)}, UnsupportedDtype, "tree_mask is int32; it must be uint64"),
        (lambda c: {"tree_mask": np.ones((164, 0), np.int64)}, ShapeError, "at least one word"),
        (lambda c: {"tree_mask": np.ones((164, 1, 1), np.int64)}, ShapeError, r"it must be \[num_tokens\] or"),
        (lambda c: {"positions": np.zeros(3, np.int32)}, ShapeError, "positions has shape .3,."),
        (lambda c: {"positions": np.zeros(164, np.int32)}, ShapeError, r"positions\[0\] is 0 and the token"),
        (lambda c: {"tree_mask": None, "positions": np.zeros(164, np.int32)}, UnsupportedOption, "pass tree_mask too"),
        (lambda c: {"seq_lens": [39, *c.seq_lens[1:]]}, ShapeError, r"has 40 new tokens and seq_lens\[0\] is 39"),
    ])  # fmt: skip
def test_what_is_refused(change, error, message):
    case = tree_case(BRANCHES)
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
    arguments = dict(zip(names, case.arrays, strict=True)) | case.options
    out = np.full_like(case.query, np.nan)
    with pytest.raises(error, match=message):
        paged_attention(**(arguments | change(case)), out=out)
    assert np.isnan(out).all()


def test_more_tokens_than_bits_are_refused():
    case = make_case(Shape(seq_lens=(80,), query_lens=(65,)))
    with pytest.raises(ShapeError, match=r"sequence 0 has 65 new tokens and tree_mask 1 words of 64 bits .* give it 2"):
        case.run(tree_mask=np.ones(65, np.uint64))
