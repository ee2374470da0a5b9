"""decode and general under random schedules, and with faults planted in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.attention_calls import Call, decode_name, general_name
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import LAYOUTS, Case, Shape, make_case, random_mask
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

KINDS = ("Plain", "Full")


def random_case(seed: int, dims: list[int], dtypes: list[str], lens: list[int], counts: list[int]) -> tuple[Case, str]:
    """Return a random case (heads, lengths, layout, options), and the kind of kernel that serves it."""
    rng = np.random.default_rng(seed)
    key_dim = int(rng.choice(dims))
    value_dim = key_dim if len(dtypes) == 2 or rng.random() < 0.5 else int(rng.choice(dims))
    cache_dtype = str(rng.choice(dtypes))
    query_dtype = cache_dtype if len(dtypes) == 2 or rng.random() < 0.5 else str(rng.choice(dtypes))
    num_kv_heads, group, n = (
        int(rng.integers(1, 4)),
        int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 16, 20])),
        rng.integers(1, 4),
    )
    aligned = [layout for layout in LAYOUTS if layout != "padded" or len(dtypes) == 3]
    shape = Shape(
        seq_lens=rng.choice(lens, n).tolist(),
        query_lens=rng.choice(counts, n).tolist() if rng.random() < 0.6 else None,
        heads=(num_kv_heads * group, num_kv_heads),
        dims=(key_dim, value_dim),
        block_size=int(rng.choice([1, 5, 8, 16, 17, 64])),
        query_dtype=query_dtype,
        cache_dtype=cache_dtype,
        layout=str(rng.choice(aligned)),
        index_dtype=str(rng.choice(["int32", "int64"])),
        shuffle_rows=bool(rng.random() < 0.4),
    )
    numbers = rng.random(num_kv_heads * group).astype(np.float32)
    full: dict[str, Any] = {"softcap": 30.0, "alibi_slopes": numbers, "mask": random_mask(shape, seed)}
    plain: dict[str, Any] = {
        "causal": False,
        "window": [5, 40, (3, 4), (None, 2)][rng.integers(4)],
        "sinks": numbers - 0.5,
        "key_scale": numbers[:num_kv_heads],
        "value_scale": numbers[:num_kv_heads],
        "scale": [-0.1, 0.3][rng.integers(2)],
    }
    kind = KINDS[int(rng.random() < 0.4)]
    options = {name: value for name, value in plain.items() if rng.random() < 0.3}
    options |= {name: value for name, value in full.items() if kind == "Full" and rng.random() < 0.5}
    return make_case(shape, seed=seed, **options), kind


def random_schedule(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "workers": int(rng.choice([1, 2, 3, 7])),
        "split": int(rng.choice([0, 16, 32, 100, 128])),
        "reorder": seed if rng.random() < 0.5 else None,
    }


LENS = [0, 1, 2, 11, 12, 15, 16, 17, 31, 33, 63, 64, 65, 99, 130, 257]


@pytest.mark.parametrize("seed", cases(range(24), range(400)))
def test_decode_keeps_the_bounds_under_any_schedule(seed):
    case, kind = random_case(seed, [64, 128, 256], ["float16", "bfloat16"], LENS, [0, 1, 2, 3])
    kit = Kit(EmulatedRuntime(seed=seed % 3))
    group = case.query.shape[1] // case.key_cache.shape[2]
    assert group <= 16 or case.query.shape[1] > 16
    Call(kit, case, decode_name(case, kind), **random_schedule(seed)).check()


@pytest.mark.parametrize("seed", cases(range(6), range(200)))
def test_decode_of_padded_dims_keeps_the_bounds_under_any_schedule(seed):
    dims = cases([80, 88, 96], [8, 24, 80, 88, 96, 104, 112, 160, 192, 200])
    case, kind = random_case(seed, list(dims), ["bfloat16", "bfloat16"], LENS, [0, 1, 2, 3])
    Call(Kit(EmulatedRuntime(seed=seed % 3)), case, decode_name(case, kind), **random_schedule(seed)).check()


@pytest.mark.parametrize("seed", cases(range(16), range(300)))
def test_the_general_path_keeps_the_bounds_under_any_schedule(seed):
    dims = [1, 3, 5, 16, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256, 300] + ([512] if seed % 8 == 0 else [])
    case, kind = random_case(seed, dims, ["float32", "float16", "bfloat16"], LENS[:14], [0, 1, 2, 5, 9, 17])
    kit = Kit(EmulatedRuntime(seed=seed % 3))
    rows = [16, 64, 128][seed % 3]
    Call(kit, case, general_name(case, kind), rows=rows, **random_schedule(seed)).check()


@pytest.mark.parametrize("query_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(64, 128), (100, 72)])
def test_keys_and_values_of_different_types_and_alignment(query_dtype, dims):
    case = make_case(Shape(seq_lens=(33, 70), heads=(4, 2), dims=dims, query_dtype=query_dtype))
    for key_dtype, value_dtype in (("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")):
        mixed = make_case(
            Shape(seq_lens=(33, 70), heads=(4, 2), dims=dims, query_dtype=query_dtype, cache_dtype=key_dtype)
        )
        other = make_case(
            Shape(seq_lens=(33, 70), heads=(4, 2), dims=dims, query_dtype=query_dtype, cache_dtype=value_dtype)
        )
        case = Case(mixed.query, mixed.key_cache, other.value_cache, mixed.block_table, mixed.seq_lens)
        Call(Kit(EmulatedRuntime()), case, general_name(case)).check()


@pytest.mark.parametrize(("dim", "prompts", "window"), in_turn([64, 128, 256, 512], [False, True], over=[[None, 100]]))
def test_a_row_has_the_same_bits_folded_and_split(dim, prompts, window):
    query_lens, rows = ([5, 1, 40], 128) if prompts else (None, 16)
    heads = (8, 2) if dim == 64 else (4, 1)
    options = {"sinks": np.linspace(-1, 1, heads[0], dtype=np.float32), "value_scale": 0.3, "window": window}
    case = make_case(Shape(seq_lens=(200, 70, 129), query_lens=query_lens, heads=heads, dims=(dim, dim)), **options)
    kit = Kit(EmulatedRuntime())
    folded = Call(kit, case, general_name(case), rows=rows, fold=64).check()
    split = Call(kit, case, general_name(case), rows=rows, fold=64, split=64).check()
    for one, other in zip(folded, split, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_pieces_of_a_row_are_joined_one_by_one_for_any_number_of_them():
    case = make_case(Shape(seq_lens=(50 * 64,), heads=(4, 1)))
    calls = [Call(Kit(EmulatedRuntime()), case, general_name(case), rows=16, fold=64, split=n) for n in (0, 64)]
    for one, other in zip(*(call.check() for call in calls), strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_a_row_of_the_general_path_has_the_same_bits_alone_and_in_a_prompt(dim):
    """With keys summed in pieces (batch-invariant), the other rows of the item do not matter."""
    case = make_case(Shape(seq_lens=(150,), query_lens=(37,), heads=(4, 2), dims=(dim, dim)), window=90)
    kit = Kit(EmulatedRuntime())
    whole = Call(kit, case, general_name(case), rows=128, fold=64).check()
    for count in (1, 5):
        options = {**case.options, "cu_query_lens": np.array([0, count], np.int32)}
        last = Case(case.query[-count:], case.key_cache, case.value_cache, case.block_table, case.seq_lens, options)
        for split in (0, 64):
            got = Call(kit, last, general_name(case), rows=128, fold=64, split=split).run()
            for one, other in zip(got, whole, strict=True):
                np.testing.assert_array_equal(one.view(np.uint32), other[-count:].view(np.uint32))


@pytest.mark.parametrize(
    ("dtype", "length", "seed"),
    in_turn(["bfloat16", "float32"], [48 * 16, 48 * 16 + 1, 64 * 16, 64 * 16 + 5], over=[[0, 1]]),
)
def test_many_splits_are_joined_in_two_steps(dtype, length, seed):
    heads = (6, 2) if length == 64 * 16 + 5 else (3, 1)
    sinks = np.linspace(-1, 1, heads[0], dtype=np.float32)
    shape = Shape((length, 40), (2, 1), heads=heads, query_dtype=dtype, cache_dtype=dtype)
    case = make_case(shape, sinks=sinks, value_scale=0.3)
    name = general_name(case) if dtype == "float32" else decode_name(case)
    schedules = [{"workers": 1}, {"workers": 7}, {"workers": 7, "reorder": 3}, {"workers": 60, "reorder": 4}]
    first = None
    for schedule in schedules:
        got = Call(Kit(EmulatedRuntime(seed=seed)), case, name, rows=16, split=16, **schedule).check()
        first = first or got
        for one, other in zip(got, first, strict=True):  # whichever CTA is the last
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "reversed"])
def test_blocks_parts_and_masks_past_2_to_the_33_elements(dtype, layout):
    shape = Shape(seq_lens=(70, 33), query_dtype=dtype, cache_dtype=dtype, layout=layout)
    case = make_case(shape, mask=random_mask(shape))
    far = 2**33 // abs(case.key_cache.strides[0] // case.key_cache.itemsize)
    # Entries without a token remain garbage.
    case.block_table = np.where(case.block_table < 100, case.block_table.astype(np.int64) + far, -1).astype(np.int32)
    name = general_name(case, "Full") if dtype == "float32" else decode_name(case, "Full")
    call = Call(Kit(EmulatedRuntime()), case, name, far=far, split=32)
    case.block_table = case.block_table - far
    call.check()


# ---- faults

RACE = "races|uninitialised|in flight"
FAULTS = {
    "a wait that leaves one group more": Fault("ring_wait", "pc_wait_copies<Tile::kStages>();", "in flight"),
    "no barrier after the wait": Fault("ring_barrier_after_wait", "", RACE),
    "no barrier before slots are read and a stage is refilled": Fault("ring_barrier_before_copies", "", RACE),
    "no barrier after the queries": Fault("decode_barrier_after_queries", "", RACE),
    "no barrier before the warps' sums are read": Fault("decode_barrier_before_sums", "", RACE),
    "no barrier before the warps' sums are overwritten": Fault("decode_barrier_after_sums", "", RACE),
    "the stage of another round": Fault("stage_of_another_round", "num_free = 2;"),
    "values of tokens of another item": Fault("values_of_other_items", "const bool valid = true;", "not finite"),
    "no barrier after a step of the walk": Fault("barrier_after_walk", "", RACE),
    "no fence before the count": Fault("fence_before_count", "", "fence"),
    "no fence after the count": Fault("fence_after_count", "", "fence"),
    "a join one part early": Fault("join_one_part_early", "const bool last = counters.atomic_add(at, 1) == count - 2;"),
    "swizzle of the copies": Fault("swizzle_of_copies", "return address + rows * kBytes;"),
    "swizzle of the reads": Fault("swizzle_of_reads", "return address + (chunks << 4);"),
    "swizzle of the sums": Fault("swizzle_of_sums", "const int to = first + 8 * n;"),
    "matrices of keys in another order": Fault(
        "key_matrices", "const int key = pc_lane() % 16, chunk = pc_lane() / 16;", "is off by"
    ),
    "older sums of one row are not rescaled": Fault(
        "rescale_by_the_other_row", "for (int i = 0; i < 4; ++i) o_[n][i] *= factors[0];", "is off by"
    ),
    "keys of the other splits": Fault("keys_of_other_splits", "const int end = keys.end;", "is off by"),
    "sinks in every split": Fault("sinks_in_every_split", "const float sink = load_sink(p, head);", "is off by"),
}


def fault_case() -> Case:
    """Return a case with two key heads, blocks smaller than a tile, and a sequence of several queries."""
    sinks = np.linspace(-1, 3, 8, dtype=np.float32)
    lens = {"seq_lens": (300, 37, 0, 129), "query_lens": (4, 1, 1, 1)}
    shape = Shape(heads=(8, 2), block_size=5, query_dtype="bfloat16", cache_dtype="bfloat16", **lens)
    return make_case(shape, sinks=sinks)


def run_faults(case: Case, *where: Path) -> None:
    for seed in range(3):
        kit = Kit(EmulatedRuntime(*where, seed=seed))
        for workers in (1, 4):
            Call(kit, case, decode_name(case), workers=workers, split=100).check()


def test_the_kernel_is_right_without_a_fault():
    run_faults(fault_case())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(planting, fault):
    # EmulatorError is an AssertionError.
    with (
        planting.planted(SOURCES, fault, FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run_faults(fault_case(), sources)


GENERAL_FAULTS = {
    "no barrier before the tiles of other warps are read": Fault("general_barrier_before_tiles", "", RACE),
    "no barrier before the tiles of other warps are refilled": Fault("general_barrier_after_tiles", "", RACE),
    "no barrier before elements are widened in place": Fault("general_barrier_before_widening", "", RACE),
    "no barrier before weights are read": Fault("general_barrier_before_weights", "", RACE),
    "no barrier before weights are overwritten": Fault("general_barrier_after_weights", "", RACE),
    "a lane keeps the wrong half of its sums": Fault("keep_the_wrong_half", "const float kept = x[i];", "is off by"),
}


def run_general_faults(*where: Path) -> None:
    """Run prompts with more rows than a warp holds, and with NaN keys that only some of the rows attend to."""
    shape = Shape((70, 33), (20, 1), heads=(4, 2), query_dtype="float16", cache_dtype="float16")
    case = make_case(shape, window=16)
    for seed in range(3):
        Call(Kit(EmulatedRuntime(*where, seed=seed)), case, general_name(case), rows=128, split=32).check()


def test_the_general_kernel_is_right_without_a_fault():
    run_general_faults()


@pytest.mark.parametrize("fault", GENERAL_FAULTS.values(), ids=GENERAL_FAULTS)
def test_a_fault_planted_in_the_general_kernel_is_caught(planting, fault):
    with (
        planting.planted(SOURCES, fault, GENERAL_FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run_general_faults(sources)
