"""Index arrays of attention over sealed blocks on a CUDA device: where they may be, wrong contents, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import SealedBlocks, errors
from pagecore.ops import paged_attention
from tests.cuda.attention_cases import BF16
from tests.cuda.kit import Kit
from tests.cuda.sealed_calls import check, run
from tests.ops.cases import Shape
from tests.ops.sealed_cases import make_sealed_case

HEADS = (8, 2)


@pytest.mark.parametrize("on_host", [("seq_lens",), ("lens", "seq_lens", "block_table"), ("block_table",), ("lens",)])
def test_indices_on_the_host_and_on_the_device(cuda, on_host):
    check(cuda, make_sealed_case(Shape((150, 1, 17, 0, 64, 16, 33), heads=HEADS)), on_host=on_host)


def test_contents_of_device_arrays_that_are_wrong_read_nothing_outside(cuda):
    """Lengths are cut to whole blocks of the sequence, blocks outside become block 0: the emulator checks the reads."""
    for shape in (
        Shape(heads=HEADS, seq_lens=(90, 40)),
        Shape(heads=HEADS, seq_lens=(90, 40), query_lens=(30, 5), **BF16),
    ):
        case = make_sealed_case(shape)
        right = case.sealed
        case.sealed = right._replace(lens=right.lens + np.array([7, 0], right.lens.dtype))
        check(cuda, case)  # rounded down
        for lens in ([2**31 - 1, -5], [10**6, 16]):
            case.sealed = right._replace(lens=np.array(lens, np.int32))
            run(cuda, case)
        for block in (-1, 10**6, len(right.key)):
            case.sealed = right._replace(block_table=np.full_like(right.block_table, block))
            run(cuda, case)


def test_selected_blocks_and_their_numbers_that_are_wrong_read_nothing_outside(cuda):
    case = make_sealed_case(Shape((150, 90), (4, 1), heads=(4, 1), **BF16), (4, 2), (16, 16))
    for lists, counts in (
        ([[0, 5, 10**6], [1, 2, 2**31 - 1]], [3, 3]),
        ([[0, 2, 5], [0, 1, 2]], [2**31 - 1, -5]),
        ([[8, 2, 1], [4, 4, 4]], [3, 3]),
        ([[-1, 2, 3], [-1, 1, 2]], [3, 3]),
        ([[-1, 5, 7], [3, -1, 4]], [3, 3]),
    ):
        run(cuda, case, blocks=np.array(lists, np.int32)[:, None], block_counts=np.array(counts, np.int32)[:, None])


REFUSALS: list[tuple[dict[str, Any], Any, str]] = [
    ({"lens": [30, 32]}, errors.ShapeError, "lens.0. is 30; .*multiple of .*32"),
    ({"lens": [96, 32]}, errors.ShapeError, "lens.0. is 96 .*70"),
    ({"block_table": [[1, 9], [3, 3]]}, errors.InvalidBlock, r"sealed block_table.0, 1. is 9"),
    ({"block_table": [[1], [3]]}, errors.ShapeError, "too narrow"),
]


def refused_call(cuda: Kit) -> tuple[list[Any], SealedBlocks]:
    arrays = [np.zeros((2, 4, 64), np.float32), *(np.zeros((4, 32, 2, 64), np.float32) for _ in range(2))]
    planes = [np.zeros(shape, np.int32) for shape in ((6, 2, 4, 64), (6, 32, 2, 8))]
    planes += [np.zeros(shape, np.float32) for shape in ((6, 2, 1, 2, 64), (6, 32, 2, 2, 2))]
    return [cuda.put(each) for each in arrays], SealedBlocks(*map(cuda.put, planes), [[1, 2], [3, 4]], [64, 32])


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_what_the_host_refuses_is_refused_if_indices_are_there(cuda, change, error, message):
    arrays, sealed = refused_call(cuda)
    with pytest.raises(error, match=message):
        paged_attention(*arrays, [[1, 2, 3], [1, 2, 3]], [70, 33], sealed=sealed._replace(**change))


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_what_the_host_refuses_is_refused_under_debug(cuda, change, error, message):
    arrays, sealed = refused_call(cuda)
    table, lens = cuda.put(np.array([[1, 2, 3], [1, 2, 3]])), cuda.put(np.array([70, 33]))
    there = {name: cuda.put(np.array(value)) for name, value in change.items()}
    pagecore.debug(True)
    try:
        with pytest.raises(error, match=message):
            paged_attention(*arrays, table, lens, sealed=sealed._replace(**there))
        paged_attention(*arrays, table, lens, sealed=sealed)
    finally:
        pagecore.debug(None)


@pytest.mark.parametrize("lens", [[30, 32], [-32, 0], [96, 32]])
def test_lengths_on_the_host_are_checked_without_the_others(cuda, lens):
    arrays, sealed = refused_call(cuda)
    table, seq_lens = cuda.put(np.array([[1, 2, 3], [1, 2, 3]])), cuda.put(np.array([70, 33]))
    with pytest.raises(errors.ShapeError, match=r"sealed lens.0. is .*at most 64"):
        paged_attention(*arrays, table, seq_lens, sealed=sealed._replace(lens=lens))


def test_planes_on_the_host_are_refused(cuda):
    arrays, sealed = refused_call(cuda)
    with pytest.raises(errors.DeviceError, match="sealed key_scale is on cpu"):
        paged_attention(
            *arrays, [[1, 2, 3], [1, 2, 3]], [70, 33],
            sealed=sealed._replace(key_scale=np.zeros((6, 2, 1, 2, 64), np.float32)),
        )  # fmt: skip
