"""Rows of latent caches on CUDA: bytes equal those of the twin, no other byte changes, and gathers equal the twin."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import debug, errors, gather_latent, write_latent
from tests.cuda.kit import Kit
from tests.cuda.memory import calls_of
from tests.ops.test_latent_rows import example
from tests.reference import latent as reference

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
READ = {"fp8_ds_mla": reference.read_fp8_ds_mla, "nvfp4_ds_mla": reference.read_nvfp4_ds_mla}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": BF16}


def numbers(count: int, dim: int = 576, seed: int = 0) -> Any:
    """Return rows whose groups have magnitudes from 1e-5 to 1e4, with a row of zeros."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-5, 5, (count, -(-dim // 16))).repeat(16, 1)[:, :dim]
    rows = np.clip(rng.standard_normal((count, dim)) * sizes, -6e4, 6e4)
    rows[count // 2] = 0
    return rows.astype(np.float32)


def poisoned(shape: tuple[int, ...], dtype: Any = np.uint8, gap: int = 0) -> Any:
    """Return an array of 0xA5 bytes with `gap` bytes after each row."""
    wide = (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize + gap)
    return np.full(wide, 0xA5, np.uint8)[..., : wide[-1] - gap].view(dtype)


def check_write(cuda: Kit, rows: Any, cache: Any, slots: Any, twin: Any, latent_dim: int = 512, **options: Any) -> None:
    """Write rows on the device, and compare every byte of the cache with those that `twin` gives."""
    device = cuda.put(cache)
    write_latent(
        cuda.put(rows[:, :latent_dim]), cuda.put(rows[:, latent_dim:]), device, None, cuda.put(slots), **options
    )
    expected = cache.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[divmod(int(slot), cache.shape[1])] = np.frombuffer(twin(rows[token]), cache.dtype)
    assert np.ascontiguousarray(cuda.get(device)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("format", ROW_BYTES)
def test_worked_example_variants_a4_a5_bytes_on_a_device(cuda, format):
    check_write(cuda, example()[None], poisoned((2, 4, ROW_BYTES[format])), [6], getattr(reference, format))


@pytest.mark.parametrize("format", ROW_BYTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_equal_the_twin(cuda, format, dtype):
    rows = numbers(13).astype(DTYPES[dtype])
    slots = np.random.default_rng(1).permutation(35)[:13]
    slots[[2, 9]] = -1

    def twin(row):
        return getattr(reference, format)(row.astype(np.float32))

    check_write(cuda, rows, poisoned((7, 5, ROW_BYTES[format]), gap=16), slots.astype(np.int64), twin, format=format)


def test_nan_and_infinity(cuda):
    rows = numbers(6, seed=3)
    rows[0, 5], rows[1, 511], rows[2, [16, 31]], rows[3, 40] = np.nan, np.inf, -np.inf, -np.nan
    rows[4, 530] = -np.inf
    for format, size in ROW_BYTES.items():
        check_write(cuda, rows, poisoned((2, 4, size)), range(6), getattr(reference, format))


@pytest.mark.parametrize("dims", [(48, 16), (7, 5), (512, 64), (45, 0)])
def test_e4m3_rows_equal_the_twin(cuda, dims):
    rows = numbers(9, sum(dims), seed=1)
    factor = np.float32(0.3)

    def twin(row):
        return bytes(reference.e4m3(float(np.float32(x) / factor)) for x in row)

    slots = np.array([4, -1, 0, 11, 7, 2, 9, 3, 5], np.int32)
    check_write(cuda, rows, poisoned((3, 4, sum(dims)), E4M3), slots, twin, dims[0], scale=0.3)


def test_e4m3_parts_in_planes_of_their_own(cuda):
    rows = numbers(5, 64, seed=2)
    host = [np.full((3, 2, dim), 7, E4M3) for dim in (48, 16)]
    device = [cuda.put(plane) for plane in host]
    write_latent(rows[:, :48], rows[:, 48:], *host, [5, 0, -1, 3, 2])
    write_latent(cuda.put(rows[:, :48]), cuda.put(rows[:, 48:]), *device, [5, 0, -1, 3, 2])
    for expected, plane in zip(host, device, strict=True):
        assert cuda.get(plane).tobytes() == expected.tobytes()


def filled(name: str, shape: tuple[int, int], seed: int = 0) -> tuple[list[Any], Any]:
    """Return host planes of random rows, and the numbers that they hold."""
    rows = numbers(shape[0] * shape[1], seed=seed)
    if name in ROW_BYTES:
        cache = poisoned((*shape, ROW_BYTES[name]), gap=16)
        write_latent(rows[:, :512], rows[:, 512:], cache, None, np.arange(len(rows)))
        if name == "fp8_ds_mla":
            cache[1, 0, 512:528].view(np.float32)[:] = [0.1, 1e-3, 0.7, 3]  # scales that are not powers of two
        read = np.array([READ[name](row.tobytes()) for row in cache.reshape(-1, ROW_BYTES[name])])
        return [cache], read.reshape(*shape, 576)
    if name == "apart":
        planes = [rows[:, :512].reshape(*shape, 512).astype(BF16), rows[:, 512:].reshape(*shape, 64).astype(BF16)]
        return planes, np.concatenate(planes, axis=-1).astype(np.float64)
    cache = np.clip(rows, -400, 400).reshape(*shape, 576).astype(E4M3 if name == "float8_e4m3fn" else DTYPES[name])
    return [cache], cache.astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ROW_BYTES, "float8_e4m3fn", *DTYPES, "apart"])
def test_gathered_rows_equal_the_twin(cuda, name, dtype):
    planes, stored = filled(name, (9, 5))
    factor = 0.25 if name == "float8_e4m3fn" else 1.0
    table, lens = np.array([[3, 0, 7], [5, 5, 5], [8, 1, 2]], np.int32), np.array([12, 0, 6], np.int32)
    arguments = [cuda.put(plane) for plane in planes] + [None] * (2 - len(planes))
    got = gather_latent(*arguments, cuda.put(table), lens, rows=[0, 1, 2], latent_scale=factor, dtype=dtype)
    stored[0] = 0
    expected = [stored[table[i][j // 5], j % 5] for i in (0, 2) for j in range(lens[i])]
    expected = (np.array(expected, np.float32) * np.float32(factor)).astype(DTYPES[dtype])
    assert cuda.get(got).astype(np.float32).tolist() == expected.astype(np.float32).tolist()


def test_without_a_null_block_block_0_holds_tokens(cuda):
    rows = np.arange(3 * 4 * 24, dtype=np.float32).reshape(3, 4, 24)
    table, lens = np.array([[0, 2], [1, 0]], np.int32), [6, 5]
    expected = [rows[0], rows[2, :2], rows[1], rows[0, :1]]
    host = gather_latent(rows[..., :16], rows[..., 16:], table, lens, null_block=False)
    assert host.tolist() == np.concatenate(expected).tolist()
    table[0, 1] = 3  # a hole
    expected[1] = np.zeros((2, 24))
    planes = cuda.put(rows[..., :16].copy()), cuda.put(rows[..., 16:].copy())
    got = gather_latent(*planes, cuda.put(table), lens, null_block=False)
    assert cuda.get(got).tolist() == np.concatenate(expected).tolist()


def test_a_dim_that_is_not_a_multiple_of_eight(cuda):
    rows = np.arange(6 * 13, dtype=np.float32).reshape(2, 3, 13)
    latent, rope = rows[..., :8], rows[..., 8:]
    got = gather_latent(cuda.put(latent.copy()), cuda.put(rope.copy()), cuda.put(np.array([[1]])), [3])
    assert cuda.get(got).tolist() == rows[1].tolist()


def test_lengths_in_device_memory_need_out(cuda):
    planes, stored = filled("fp8_ds_mla", (4, 4))
    cache, table, lens = cuda.put(planes[0]), cuda.put(np.array([[2, 1], [3, 0]], np.int32)), cuda.put(np.array([6, 2]))
    with pytest.raises(errors.UnsupportedOption, match=r"seq_lens is on cuda:0.*pass out="):
        gather_latent(cache, None, table, lens)
    out = cuda.empty((8, 576))
    assert gather_latent(cache, None, table, lens, out=out) is out
    expected = np.concatenate([stored[2], stored[1, :2], stored[3, :2]])
    assert cuda.get(out).tolist() == expected.tolist()
    memory = cuda.put(np.full((8, 580), -7, np.float32))
    gather_latent(cache, None, table, lens, out=memory[:, 2:578])
    assert cuda.get(memory)[:, 2:578].tolist() == expected.tolist()
    assert (cuda.get(memory)[:, [0, 1, 578, 579]] == -7).all()


def test_a_captured_write_and_gather_follow_their_arrays(cuda):
    rows = numbers(4)
    latent, rope, cache = cuda.put(rows[:, :512]), cuda.put(rows[:, 512:]), cuda.put(np.zeros((3, 4, 656), np.uint8))
    slots, table, lens = cuda.put(np.array([4, 5, 6, -1])), cuda.put(np.array([[1]])), cuda.put(np.array([0]))
    out = cuda.empty((4, 576))

    def work(stream):
        write_latent(latent, rope, cache, None, slots, stream=stream)
        gather_latent(cache, None, table, lens, out=out, stream=stream)

    work(0)
    replay = cuda.capture(work)
    for tensor, values in ((slots, [7, 6, 5, 4]), (lens, [4])):
        host = np.array(values)
        cuda.runtime.copy(tensor.pointer, host.ctypes.data, host.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    expected = [reference.read_fp8_ds_mla(reference.fp8_ds_mla(row)) for row in rows[::-1]]
    assert cuda.get(out).tolist() == np.array(expected).tolist()


def test_a_call_is_one_launch(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts launches")
    rows = numbers(8)
    latent, rope, cache = cuda.put(rows[:, :512]), cuda.put(rows[:, 512:]), cuda.put(np.zeros((3, 4, 352), np.uint8))
    slots, table, lens = cuda.put(np.arange(4, 12)), cuda.put(np.array([[1, 2]])), cuda.put(np.array([8]))
    out = cuda.empty((8, 576), "bfloat16")
    assert calls_of(cuda, lambda: write_latent(latent, rope, cache, None, slots)) == {"launches": 1}
    assert calls_of(cuda, lambda: gather_latent(cache, None, table, lens, out=out)) == {"launches": 1}


def test_invalid_slots_and_blocks_are_skipped(cuda):
    rows = numbers(4)
    cache = cuda.put(np.zeros((2, 4, 352), np.uint8))
    slots = cuda.put(np.array([8, -5, 2**40, 7]))
    write_latent(cuda.put(rows[:, :512]), cuda.put(rows[:, 512:]), cache, None, slots)
    got = cuda.get(cache).reshape(8, 352)
    assert got[7].tobytes() == reference.nvfp4_ds_mla(rows[3])
    assert not got[:7].any()
    table, lens, picked = (cuda.put(np.array(x)) for x in ([[9, 1], [-1, 1]], [8, 50, -3], [1, 0, 7]))
    out = cuda.get(gather_latent(cache, None, table, lens, rows=picked, out=cuda.empty((16, 576))))
    expected = np.zeros((16, 576))
    expected[[7, 15]] = reference.read_nvfp4_ds_mla(got[7].tobytes())
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("on_device", [True, False])
def test_invalid_indices_raise_on_the_host_and_under_debug(cuda, on_device):
    def given(values):
        return cuda.put(np.array(values)) if on_device else values

    cache, row = cuda.put(np.full((2, 4, 656), 7, np.uint8)), cuda.put(np.zeros((1, 512), np.float32))
    rope, out = cuda.put(np.zeros((1, 64), np.float32)), cuda.empty((3, 576))
    debug(on_device)
    try:
        with pytest.raises(errors.InvalidBlock, match=r"slot_mapping\[0\] is 8"):
            write_latent(row, rope, cache, None, given([8]))
        with pytest.raises(errors.InvalidBlock):
            gather_latent(cache, None, given([[2]]), given([3]), out=out)
        with pytest.raises(errors.ShapeError, match="seq_lens"):
            gather_latent(cache, None, given([[1]]), given([5]), out=out)
    finally:
        debug(False)
    assert (cuda.get(cache) == 7).all()
    assert np.isnan(cuda.get(out)).all()


def test_arrays_of_two_devices_are_refused(cuda):
    rows = np.zeros((1, 576), np.float32)
    cache = cuda.put(np.zeros((2, 4, 656), np.uint8))
    with pytest.raises(errors.DeviceError, match="latent_cache is on cuda:0"):
        write_latent(rows[:, :512], rows[:, 512:], cache, None, [0])
    with pytest.raises(errors.DeviceError, match="out is on cpu"):
        gather_latent(cache, None, [[1]], [1], out=np.zeros((1, 576), np.float32))
    with pytest.raises(errors.ShapeError, match=r"out has shape .*; it must be \(1, 576\)"):
        gather_latent(cache, None, [[1]], [1], out=cuda.empty((2, 576)))
    plain = cuda.empty((2, 4, 576))
    with pytest.raises(errors.UnsupportedOption, match="shares memory"):
        gather_latent(plain, None, [[1]], [4], out=plain[1])


@pytest.mark.parametrize("on_device", [True, False])
def test_empty_calls(cuda, on_device):
    def given(values):
        return cuda.put(values) if on_device else values

    cache = cuda.put(np.full((2, 4, 656), 7, np.uint8))
    empty = cuda.put(np.zeros((0, 576), np.float32))
    write_latent(empty[:, :512], empty[:, 512:], cache, None, given(np.zeros(0, np.int32)))
    out = cuda.empty((3 if on_device else 0, 576))
    for table in (np.zeros((0, 2), np.int32), np.zeros((0, 0), np.int32)):
        gather_latent(cache, None, given(table), given(np.zeros(0, np.int32)), out=out)
    got = gather_latent(cache, None, given(np.ones((2, 1), np.int32)), np.zeros(2, np.int32))
    assert got.shape == (0, 576)
    assert (cuda.get(cache) == 7).all()
    assert np.isnan(cuda.get(out)).all()
