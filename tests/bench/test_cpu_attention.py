"""bench/host/cpu_attention.py: the read, the paged copies, the targets, the picture."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from bench.harness.arrays import DTYPES
from bench.harness.runner import Bench
from bench.host import cpu_attention, picture
from bench.host.attention_controls import READ, TORCH, Reader, on_threads
from bench.host.attention_load import Load, Paged, Shape
from tests.capabilities import require

SMALL = Shape(4, 2, 64, 3, 256)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_read_reaches_every_byte_of_every_array(threads):
    arrays = [np.zeros(n, np.int64) for n in (50, 3, 1)]
    with closing(Reader(arrays, threads)) as read:
        assert read() == 0
        for array in arrays:
            for i in range(array.size):
                array[i] = 1 << 40
                assert read() == 1 << 40
                array[i] = 0


def test_a_read_takes_arrays_of_any_dtype_and_close_ends_its_threads():
    read = Reader([np.ones((2, 8), np.float32).astype(DTYPES["bfloat16"])], 2)
    assert read() == 0x3F803F803F803F80
    read.close()
    assert not any(worker.is_alive() for worker in read._workers)


@pytest.mark.parametrize("heads", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_blocks_hold_the_contiguous_numbers_of_the_controls(dtype, block_size, heads):
    load = Load(SMALL, dtype)
    paged = Paged(load, block_size, heads)
    assert load.key.nbytes + load.value.nbytes == SMALL.nbytes(dtype)
    assert sorted(paged.table.ravel()) == list(range(1, 3 * 256 // block_size + 1))
    for plane, cache in ((load.key, paged.key_cache), (load.value, paged.value_cache)):
        for sequence, blocks in zip(plane, paged.table, strict=True):
            tokens = cache[blocks].reshape(256, 2, 64)
            np.testing.assert_array_equal(tokens.swapaxes(0, 1), sequence)
        assert cache.strides[1] > cache.strides[2] if heads == "NHD" else cache.strides[1] <= cache.strides[2]


def test_no_two_tokens_have_the_same_key():
    key = Load(Shape(4, 2, 64, 2, 8192), "float32").key.reshape(-1, 64)
    assert len(np.unique(key, axis=0)) == len(key)


def test_a_figure_is_refused_if_attention_differs_from_its_controls():
    load = Load(SMALL, "float32")
    paged = Paged(load)
    query = SMALL.query("float32", SMALL.sequences)
    cpu_attention._check_decode(load, paged, query, {})
    paged.table[-1, 3] = paged.table[0, 0]
    with pytest.raises(AssertionError):
        cpu_attention._check_decode(load, paged, query, {})


def test_decode_from_dram_has_targets_on_one_thread_and_on_two(monkeypatch):
    for threads in (1, 2):
        targets = cpu_attention._decode_targets(cpu_attention.DRAM, "bfloat16", threads)
        assert targets == {"at_least": {READ: 0.80, TORCH: 2.1}}
        targets = cpu_attention._decode_targets(cpu_attention.DRAM, "float32", threads)
        assert targets == {"at_least": {READ: 0.85, TORCH: 1.3}}
    assert cpu_attention._decode_targets(cpu_attention.DRAM, "float16", 1) == {}
    for isa, target in (("x86-64-v4-amx", {"gb_per_s_at_least": 30.0}), ("x86-64-v4-bf16", {})):
        monkeypatch.setattr(cpu_attention.pagecore, "isa", lambda isa=isa: isa)
        assert cpu_attention._decode_targets(cpu_attention.IN_CACHE, "bfloat16", 2) == target
        assert cpu_attention._decode_targets(cpu_attention.IN_CACHE, "bfloat16", 1) == {}


def test_shapes_that_are_too_large_are_left_out_and_named(monkeypatch):
    lines = []
    bench = Bench(kind="smoke", write=lines.append)
    monkeypatch.setattr(cpu_attention, "BYTES_MAX", 2 * 2 * 128 * 64 * 2)
    cpu_attention._sweep(bench, None, (1,))
    assert [figure.sizes["dtype"] for figure in bench.figures] == ["bfloat16", "float16"]
    assert bench.notes[0].startswith("left out, ")
    assert bench.notes[0].endswith("2 x 128, 8/1 x 64 float32")


def test_thread_counts_are_restored(torch):
    with on_threads(2, torch):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each_dtype_and_number_of_threads():
    require("matplotlib")
    bench = Bench(kind="smoke", write=lambda _line: None)
    for dtype in ("float32", "bfloat16"):
        cpu_attention._decode(bench, None, dtype, SMALL, (1, 2))
    drawn = picture.draw(bench.figures, "a machine")
    titles = [ax.get_title(loc="left") for ax in drawn.axes]
    assert titles == ["float32, 1 thread", "float32, 2 threads", "bfloat16, 1 thread", "bfloat16, 2 threads"]
    assert all(ax.get_xlabel().endswith("GB/s") for ax in drawn.axes)
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == ["3 x 256, 4/2 x 64"]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["pagecore", READ, "NumPy matmul"]


def test_a_picture_without_figures_is_drawn():
    require("matplotlib")
    assert picture.draw([], "a machine").axes == []
