"""Every barrier, fence, wait and commit of the real kernels is needed: without it the emulator reports an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pagecore
from pagecore.arrays.cuda.current import use_runtime
from pagecore.ops.cuda.attention.variants import use_prefill_variant
from tests.cuda import test_merge, test_sealed
from tests.cuda.attention_cases import BF16, DeviceCase, check
from tests.cuda.kit import Kit
from tests.cuda.matrix import FULL
from tests.cuda.sealed_calls import check as check_sealed
from tests.cuda.sealed_calls import run as run_sealed
from tests.cuda.test_latent_attention import check as check_latent
from tests.cuda.test_stored import check as check_stored
from tests.emulator import test_sparse_faults, test_state_faults
from tests.emulator.build import SOURCES
from tests.emulator.mutants import mutants, survivors
from tests.ops.cases import Shape, make_case
from tests.ops.format_cases import make_format_case
from tests.ops.latent_cases import make_case as make_latent_case
from tests.ops.sealed_cases import keep_sealed, make_sealed_case

DECODE = Shape(seq_lens=(700, 37, 0, 129, 5), heads=(8, 2), block_size=5, **BF16)
MIXED = Shape(seq_lens=(300, 77, 5, 0, 130, 64), query_lens=(40, 77, 1, 0, 2, 64), heads=(8, 2), **BF16)
FLOATS = replace(MIXED, query_dtype="float32", cache_dtype="float32")
NO_KEYS = Shape(seq_lens=(3, 200), query_lens=(40, 40), heads=(8, 2), **BF16)  # for the first tile to attend to
LONG = Shape(seq_lens=(2100,), query_lens=(40,), heads=(8, 2), **BF16)


def check_nan(kit, shape):
    """NaN values reach the queries that attend to them, and not the others of their tile."""
    case = make_case(shape)
    for key in (270, 299):
        case.value_cache[case.block_table[0, key // 16], key % 16, :, 3] = np.nan
    got = DeviceCase(kit, case).run()[0].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(case.expect()[0]))


def attend(*shapes, num_workers=()):
    """Return work with few workers, so that each has several items, and with splits that are joined in two steps."""

    def work(runtime):
        with use_runtime(runtime):
            for shape in shapes:
                check(Kit(runtime), make_case(shape))
            for number in num_workers:
                check(Kit(runtime), make_case(shapes[0]), plan=True, num_workers=number)
            if num_workers:
                long = replace(shapes[0], seq_lens=(50 * 128,), query_lens=None, heads=(4, 1), block_size=64)
                check(Kit(runtime), make_case(long), plan=True, num_workers=50)

    return work


def decode_nan(runtime):
    """Decode two tokens, of which the first does not attend to a value of NaN in its tile."""
    with use_runtime(runtime):
        check_nan(Kit(runtime), replace(DECODE, seq_lens=(300,), query_lens=(2,), block_size=16))


def prompts(variant="Plain", **sizes):
    def work(runtime):
        with use_runtime(runtime), use_prefill_variant(variant):
            kit = Kit(runtime)
            check(kit, make_case(replace(MIXED, **sizes), scale=-0.1))
            check(kit, make_case(replace(NO_KEYS, **sizes)))
            check_nan(kit, replace(MIXED, **sizes))
            check(kit, make_case(replace(LONG, **sizes)), plan=True, batch_invariant=True)

    return work


def gather(runtime):
    """Gather sequences; the start of each is a sum over a block of threads."""
    cache = np.arange(9 * 4 * 2 * 8, dtype=np.float32).reshape(9, 4, 2, 8)
    table, lens = np.arange(1, 9, dtype=np.int32).reshape(4, 2), np.array([5, 8, 1, 7], np.int32)
    with use_runtime(runtime):
        kit = Kit(runtime)
        out = kit.empty((21, 2, 8))
        pagecore.gather_blocks(kit.put(cache), kit.put(table), kit.put(lens), out=out)
        np.testing.assert_array_equal(kit.get(out), pagecore.gather_blocks(cache, table, lens))


def attend_stored(*formats):
    """Return work over caches whose keys and values have formats; None for float32."""

    def work(runtime):
        with use_runtime(runtime):
            for names in formats:
                for shape in (MIXED, DECODE):
                    check_stored(Kit(runtime), make_format_case(*names, shape=replace(shape, cache_dtype="float32")))

    return work


def attend_latents(*kinds):
    """Return work over latent caches of different kinds, with few workers and in pieces."""

    def work(runtime):
        with use_runtime(runtime):
            for kind in kinds:
                case = make_latent_case((300, 70, 0, 0, 33), heads=20, **kind)
                check_latent(Kit(runtime), case, plan={"num_workers": 3})
                case = make_latent_case((2100, 0, 0, 5), heads=3, **kind)
                check_latent(Kit(runtime), case, plan={"num_workers": 1, "batch_invariant": True})

    return work


def prompts_stored(name, dtype):
    def work(runtime):
        with use_runtime(runtime):
            for shape in (MIXED, NO_KEYS):
                check_stored(Kit(runtime), make_format_case(name, shape=replace(shape, query_dtype=dtype)))

    return work


def prompts_sealed(runtime):
    """Attend by prompts whose tiles are sealed, not sealed, and in part; with few workers, and in pieces."""
    with use_runtime(runtime):
        kit = Kit(runtime)
        for shape in (replace(MIXED, seq_lens=(300, 77, 70, 0, 130, 64)), NO_KEYS):
            check_sealed(kit, make_sealed_case(shape), planned={"num_workers": 2})
        check_sealed(kit, make_sealed_case(replace(LONG, seq_lens=(1100,))), planned={"batch_invariant": True})
        wide = Shape((80,), (33,), heads=(4, 1), dims=(256, 256), **BF16)  # codes are unpacked where they arrive
        check_sealed(kit, keep_sealed(make_sealed_case(wide, (4, 2)), 0, 48))


def decode_sealed(runtime):
    """Decode over sealed tiles with scales of NaN, in windows that begin within a tile."""
    with use_runtime(runtime):
        kit = Kit(runtime)
        for bits in (2, 4):
            test_sealed.test_nan_reaches_only_the_rows_that_attend_to_it(kit, bits)
        shape = Shape((70, 33, 90), (4, 1, 2), heads=(4, 1), dims=(80, 80), **BF16)
        windowed = make_sealed_case(shape, (2, 4), (16, 16), window=40)
        windowed.sealed.value_scale[windowed.sealed.block_table[0, 1], 12] = np.nan
        run_sealed(kit, windowed)


def merge(runtime):
    with use_runtime(runtime):
        test_merge.test_the_results_may_overwrite_either_part(Kit(runtime), 64, 0, runtime.seed)


def states(runtime):
    with use_runtime(runtime):
        test_state_faults.check(Kit(runtime))


def in_turn(*works):
    def work(runtime):
        for each in works:
            each(runtime)

    return work


def sparse(runtime):
    """Run the kernels of sparse selection. A selection has one block of threads for all rows."""
    for kernel in test_sparse_faults.WORK:
        test_sparse_faults.run_on(runtime, kernel)


KERNELS = {
    "decode": (
        [
            "attention/decode/decode.cu",
            "attention/decode/rows.cuh",
            "attention/tiles/warp_ring.cuh",
            "attention/tiles/tile_walk.cuh",
            "attention/softmax/splits.cuh",
        ],
        in_turn(attend(DECODE, MIXED, num_workers=(2,)), decode_nan),
    ),
    "decode over sealed blocks": (["attention/decode/sealed_rows.cuh"], decode_sealed),
    "general": (
        ["attention/general/general.cu", "attention/general/ring.cuh", "attention/general/rows.cuh"],
        attend(FLOATS, replace(FLOATS, cache_dtype="bfloat16"), replace(DECODE, dims=(40, 40)), num_workers=(2,)),
    ),
    "stored": (
        ["attention/general/stored.cuh", "attention/decode/stored_rows.cuh", "attention/tiles/warp_ring.cuh"],
        attend_stored(("int8_token", None), ("int8_token", "int8_token"), ("nvfp4", "nvfp4")),
    ),
    "latent": (
        ["latent/attention/latent.cu", "latent/attention/ring.cuh", "latent/attention/rows.cuh"],
        attend_latents({"dims": (256, 64)}, {"dims": (256, 64), "format": "float8_e4m3fn"}),
    ),
    "general latent": (["latent/attention/general_latent.cu"], attend_latents({"dims": (40, 16), "dtype": "float32"})),
    "prefill over codes": (
        ["attention/prefill/stored.cuh"],
        in_turn(prompts_stored("int8_token", "float16"), prompts_stored("nvfp4", "bfloat16")),
    ),
    "prefill over sealed blocks": (
        ["attention/prefill/sealed.cuh", "attention/prefill/sealed_rows.cuh"],
        prompts_sealed,
    ),
    "prefill": (
        [
            "attention/prefill/prefill.cu",
            "attention/prefill/feed.cuh",
            "attention/prefill/output.cuh",
            "attention/prefill/sums.cuh",
        ],
        prompts(),
    ),
    "prefill variants": (
        ["attention/prefill/prefill.cu", "attention/prefill/sums.cuh"],
        prompts("SlotsFirstWholeTile", dims=(128, 128)),
    ),
    "prefill of wide keys": (
        ["attention/prefill/prefill.cu", "attention/prefill/output.cuh"],
        prompts(dims=(192, 128)),
    ),
    "merge": (["attention/softmax/merge.cu"], merge),
    "states": (["codecs/states.cu"], states),
    "sparse": (["sparse/summaries.cu", "sparse/block_scores.cu", "sparse/select.cu", "sparse/select_cut.cuh"], sparse),
    "plan": (
        ["attention/plan/plan.cu", "attention/plan/section.cuh", "device/block_sums.cuh"],
        in_turn(attend(MIXED, replace(DECODE, seq_lens=(50,) * 300)), gather),
    ),
}


# Barriers that the present order of work does without. They stay for an order without these properties.
UNNEEDED = {
    # Before the rows are read, others follow: those of the widening of values after keys, that of weights after values.
    "general": ["attention/general/ring.cuh:163: pc_sync_warp();"],
    # Each lane of general reads only the numbers that it has widened itself, of every dim.
    "stored": ["attention/general/stored.cuh:85: pc_sync_warp();"],
}


@pytest.mark.skipif(not FULL, reason="needs PAGECORE_EMULATE=full")
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_synchronisation_can_be_removed(tmp_path, kernel):
    files, work = KERNELS[kernel]
    assert survivors(tmp_path, files, work) == UNNEEDED.get(kernel, [])


def test_every_source_with_a_synchronisation_is_tried():
    sources = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu*"))
    tried = {file for files, _ in KERNELS.values() for file in files}
    assert {mutant.file for mutant in mutants(sources)} <= tried
