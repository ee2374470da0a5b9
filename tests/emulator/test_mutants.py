"""Every barrier, fence, wait and commit of the real kernels is needed: without it the emulator complains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagecore.arrays.cuda import use_runtime
from tests.cuda.attention_cases import check
from tests.cuda.kit import Kit
from tests.cuda.matrix import FULL
from tests.emulator.mutants import survivors
from tests.ops.cases import Shape, make_case

BF16 = {"query_dtype": "bfloat16", "cache_dtype": "bfloat16"}
DECODE = Shape(seq_lens=(700, 37, 0, 129, 5), heads=(8, 2), block_size=5, **BF16)
MIXED = Shape(seq_lens=(300, 77, 5, 0, 130, 64), query_lens=(40, 77, 1, 0, 2, 64), heads=(8, 2), **BF16)
FLOATS = replace(MIXED, query_dtype="float32", cache_dtype="float32")


def with_nan(case):
    """A value that is not a number, of a key that some queries of a tile attend to and others do not."""
    last = int(case.seq_lens[4]) - 1
    case.value_cache[case.block_table[4, last // 16], last % 16, 0, 3] = np.nan
    return case


def attend(*shapes, num_workers=()):
    """With few workers too, of which each has several items, and with splits that are joined in two steps."""

    def work(runtime):
        with use_runtime(runtime):
            for shape in shapes:
                check(Kit(runtime), make_case(shape))
            for number in num_workers:
                check(Kit(runtime), make_case(shapes[0]), plan=True, num_workers=number)
            if num_workers:
                long = replace(shapes[0], seq_lens=(50 * 128,), heads=(4, 1), block_size=64)
                check(Kit(runtime), make_case(long), plan=True, num_workers=50)

    return work


KERNELS = {
    "decode": (["decode.cu", "tile_walk.cuh", "splits.cuh"], attend(DECODE, MIXED, num_workers=(2,))),
    "general": (["general.cu"], attend(FLOATS, replace(DECODE, dims=(40, 40)), num_workers=(2,))),
    "prefill": (["prefill.cu"], attend(MIXED)),
    "plan": (["plan.cu"], attend(MIXED, replace(DECODE, seq_lens=(50,) * 300))),
}


@pytest.mark.skipif(not FULL, reason="needs PAGECORE_EMULATE=full")
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_synchronisation_is_missed(tmp_path, kernel):
    files, work = KERNELS[kernel]
    assert survivors(tmp_path, files, work) == []
