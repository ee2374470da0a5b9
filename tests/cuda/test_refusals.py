"""Refusals of the ops that move data on CUDA devices: other devices, dtypes, strides, streams, captures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from pagecore.arrays import strided
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory
from tests.ops.block_cases import random_numbers
from tests.together import together

SHAPE, DTYPE, OPTION, DEVICE = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption, errors.DeviceError

OPS: dict[str, dict[str, Any]] = {
    "write_kv": {
        "key": random_numbers((3, 2, 8), "float32"),
        "value": random_numbers((3, 2, 8), "float32", 1),
        "key_cache": np.zeros((6, 4, 2, 8), np.float32),
        "value_cache": np.zeros((6, 4, 2, 8), np.float32),
        "slot_mapping": np.asarray([4, 5, 23]),
        "key_scale": np.asarray([0.5, 2], np.float32),
    },
    "gather_blocks": {
        "cache": random_numbers((9, 4, 2), "float32"),
        "block_table": np.asarray([[3, 2], [8, 1]], np.int32),
        "seq_lens": np.asarray([5, 4], np.int32),
        "rows": np.asarray([0, 1]),
        "out": np.zeros((9, 2), np.float32),
    },
    "scatter_blocks": {
        "values": np.zeros((9, 2), np.float32),
        "cache": random_numbers((9, 4, 2), "float32"),
        "block_table": np.asarray([[3, 2], [8, 1]], np.int32),
        "seq_lens": np.asarray([5, 4], np.int32),
        "rows": np.asarray([0, 1]),
    },
    "transfer_blocks": {
        "source_caches": random_numbers((9, 4, 2), "float32"),
        "target_caches": np.zeros((5, 4, 2), np.float32),
        "pairs": np.asarray([(1, 4), (7, 1)]),
    },
    "copy_blocks": {"caches": random_numbers((9, 4, 2), "float32"), "pairs": np.asarray([(1, 4), (7, 1)])},
    "merge_attention": {
        "out_a": random_numbers((3, 4, 8), "float32"),
        "lse_a": np.zeros((3, 4), np.float32),
        "out_b": random_numbers((3, 4, 8), "float32", 1),
        "lse_b": np.zeros((3, 4), np.float32),
        "out": np.zeros((3, 4, 8), np.float32),
        "lse": np.zeros((3, 4), np.float32),
    },
}
# Arrays that determine the device of a call, and arrays that are copied to it from the host.
FIRST = {"key", "cache", "source_caches", "caches", "out_a"}
CARRIED = {"slot_mapping", "key_scale", "block_table", "seq_lens", "rows", "pairs"}


def on_device(cuda: Kit, op: str) -> dict[str, Any]:
    return {name: cuda.put(array) for name, array in OPS[op].items()}


@together(("op", "name"), [(op, name) for op in OPS for name in OPS[op]])
def test_the_arrays_of_a_call_are_on_one_device(cuda, op, name):
    """One array on the host among arrays on the device, and the reverse."""
    device = on_device(cuda, op)
    if name in CARRIED:
        getattr(pagecore, op)(**device | {name: OPS[op][name]})
    elif name not in FIRST:
        with pytest.raises(DEVICE, match=rf"^{name} is on cpu and \w+ on cuda:0; .* a copy of {name} on cuda:0"):
            getattr(pagecore, op)(**device | {name: OPS[op][name]})
    if name not in FIRST:
        with pytest.raises(DEVICE, match=rf"^{name} is on cuda:0 and \w+ on cpu; .* a copy of {name} on cpu"):
            getattr(pagecore, op)(**OPS[op] | {name: device[name]})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in OPS[op] if name not in FIRST])
def test_arrays_on_different_devices_are_refused(cuda, op, name):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it emulates several devices")
    cuda.runtime._num_devices = 2
    array = OPS[op][name]
    other = pagecore.empty(array.shape, array.dtype, device="cuda:1")
    with pytest.raises(DEVICE, match=rf"^{name} is on cuda:1 and \w+ on cuda:0; "):
        getattr(pagecore, op)(**on_device(cuda, op) | {name: other})


@together(("op", "others"), [("copy_blocks", "caches"), ("gather_blocks", "cache")])
def test_the_array_of_a_list_on_another_device_is_named(cuda, op, others):
    device = on_device(cuda, op)
    device.pop("out", None)
    with pytest.raises(DEVICE, match=rf"^{others}\[1\] is on cpu and {others} on cuda:0"):
        getattr(pagecore, op)(**device | {others: [device[others], OPS[op][others]]})


INDICES = [(op, name) for op in OPS for name in OPS[op] if name in CARRIED - {"key_scale"}]


@together("dtype", [np.int8, np.uint8, np.float32])
@together(("op", "name"), INDICES)
def test_index_arrays_on_a_device_are_int32_or_int64(cuda, op, name, dtype):
    array = cuda.put(OPS[op][name].astype(dtype))
    with pytest.raises(DTYPE, match=rf"^{name} is \w+ on cuda:0; it must be int32 or int64 there"):
        getattr(pagecore, op)(**on_device(cuda, op) | {name: array})


@together(("op", "name"), [case for case in INDICES if case[1] in ("block_table", "pairs")])
def test_tables_and_pairs_on_a_device_have_contiguous_rows(cuda, op, name):
    array = cuda.put(np.asfortranarray(OPS[op][name]))
    with pytest.raises(SHAPE, match=rf"^{name} has .*the last axis must be contiguous.*pass a copy"):
        getattr(pagecore, op)(**on_device(cuda, op) | {name: array})


@together(("op", "name"), INDICES)
def test_index_arrays_on_a_device_are_aligned(cuda, op, name):
    array = OPS[op][name]
    odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    with pytest.raises(SHAPE, match=rf"^{name} has .*all must be multiples of {array.itemsize}"):
        getattr(pagecore, op)(**on_device(cuda, op) | {name: cuda.put(odd)})


BAD_SCALES: list[tuple[Any, bool, Any, str]] = [
    (np.ones(2, np.float16), True, DTYPE, "key_scale is float16 on cuda:0; it must be float32 there"),
    (np.ones(3, np.float32), True, SHAPE, r"key_scale has shape \(3,\); it must be \[2\]"),
    (np.ones(4, np.float32)[::2], True, SHAPE, "key_scale has .*the last axis must be contiguous"),
    (np.ones((1, 1), np.float32), True, SHAPE, r"key_scale has shape \(1, 1\); it must be \[2\]"),
    (np.ones((), np.float16), True, DTYPE, "key_scale is float16 on cuda:0; it must be float32 there"),
    (0.0, False, OPTION, "key_scale holds 0.0; as a float32 it must be finite, and not 0"),
    (float("nan"), False, OPTION, "key_scale is nan"),
    (1e300, False, OPTION, "key_scale is 1e[+]300; it must be finite as a float32"),
    ([1.0, np.inf], False, OPTION, "key_scale holds inf"),
    ([1.0, 0.0], False, OPTION, "key_scale holds 0.0"),
    ([1.0, 1.0, 1.0], False, SHAPE, "key_scale"),
    ("one", False, DTYPE, "key_scale"),
]


@together(("scale", "is_put", "error", "message"), BAD_SCALES)
def test_scales_are_numbers_for_each_head(cuda, scale, is_put, error, message):
    with pytest.raises(error, match=message):
        pagecore.write_kv(**on_device(cuda, "write_kv") | {"key_scale": cuda.put(scale) if is_put else scale})


def test_a_scale_on_the_host_may_be_an_array_of_one_number(cuda):
    def written(key_scale, value_scale):
        given = on_device(cuda, "write_kv") | {"key_scale": key_scale, "value_scale": value_scale}
        pagecore.write_kv(**given)
        return np.stack([cuda.get(given["key_cache"]), cuda.get(given["value_cache"])])

    expected = written(0.5, 2.0)
    assert (expected != written(1.0, 1.0)).any()
    assert (written(np.float16(0.5), np.asarray(2)) == expected).all()
    assert (written([0.5], np.full(1, 2, np.float16)) == expected).all()


def test_written_arrays_that_overlap_read_arrays_are_refused(cuda):
    """The check compares addresses and reads no device memory."""
    memory = cuda.put(random_numbers((20, 4, 2), "float32"))
    table, lens = cuda.put(np.asarray([[3, 2]])), cuda.put(np.asarray([8]))
    with pytest.raises(OPTION, match="out shares memory with cache"):
        pagecore.gather_blocks(memory, table, lens, out=memory[4:6].reshape(8, 2))
    with pytest.raises(OPTION, match="cache shares memory with values"):
        pagecore.scatter_blocks(memory[4:6].reshape(8, 2), memory, table, lens)
    with pytest.raises(OPTION, match="target_caches shares memory with source_caches"):
        pagecore.transfer_blocks(memory[:11], memory[10:], [(1, 2)])
    pagecore.transfer_blocks(memory[:10], memory[10:], [(1, 2)])
    pagecore.transfer_blocks(memory[:, :, :1], memory[:, :, 1:], [(1, 2)])


def test_written_caches_that_overlap_each_other_or_read_arrays_are_refused(cuda):
    given = on_device(cuda, "write_kv")
    with pytest.raises(OPTION, match="key_cache shares memory with value_cache"):
        pagecore.write_kv(**given | {"value_cache": given["key_cache"]})
    tokens, heads, dim = given["key"].shape
    inside = strided(given["value_cache"].reshape(-1), (tokens, heads, dim))
    with pytest.raises(OPTION, match="value_cache shares memory with key;"):
        pagecore.write_kv(**given | {"key": inside})
    with pytest.raises(OPTION, match=r"caches\[0\] shares memory with caches\[1\]"):
        pagecore.copy_blocks([given["key_cache"], given["key_cache"]], [(1, 2)])


def test_results_that_overlap_each_other_are_refused(cuda):
    memory = strided(cuda.empty((8,)), (9, 2), (0, 4))
    with pytest.raises(SHAPE, match=r"out has strides .*elements share memory"):
        pagecore.gather_blocks(**on_device(cuda, "gather_blocks") | {"out": memory})
    with pytest.raises(SHAPE, match=r"out has strides .*elements share memory"):
        pagecore.merge_attention(
            **on_device(cuda, "merge_attention") | {"out": strided(cuda.empty((8,)), (3, 4, 8), (0, 0, 4))}
        )


@together("op", OPS)
def test_host_arrays_take_no_stream(op):
    with pytest.raises(OPTION, match="stream is 0; calls on the host have no stream: leave stream out"):
        getattr(pagecore, op)(**OPS[op], stream=0)


@together("stream", [-1, "default", 1.5, object()])
@together("op", OPS)
def test_an_invalid_stream_is_refused(cuda, op, stream):
    with pytest.raises(OPTION, match="stream is"):
        getattr(pagecore, op)(**on_device(cuda, op), stream=stream)


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@together("wrap", [int, Stream])
@together("op", OPS)
def test_work_is_submitted_to_the_stream_of_the_call(cuda, op, wrap):
    """A graph captures the work of the stream; nothing runs before the launch."""
    device = on_device(cuda, op)
    getattr(pagecore, op)(**on_device(cuda, op))  # kernels are loaded before a capture
    replay = cuda.capture(lambda stream: getattr(pagecore, op)(**device, stream=wrap(stream)))
    for name, array in OPS[op].items():
        assert_same_memory(cuda.get(device[name]), array)
    replay()
    expected = {name: array.copy() for name, array in OPS[op].items()}
    getattr(pagecore, op)(**expected)
    for name, array in expected.items():
        if op == "merge_attention":
            np.testing.assert_allclose(cuda.get(device[name]), array, rtol=1e-6)
        else:
            assert_same_memory(cuda.get(device[name]), array)


def test_a_graph_reads_its_index_arrays_at_each_launch(cuda):
    device = on_device(cuda, "write_kv")
    pagecore.write_kv(**device)
    replay = cuda.capture(lambda stream: pagecore.write_kv(**device, stream=stream))
    expected = {name: array.copy() for name, array in OPS["write_kv"].items()}
    pagecore.write_kv(**expected)
    for slots in ([0, 1, 2], [9, -1, 8]):
        new = cuda.put(np.asarray(slots))
        cuda.runtime.copy(device["slot_mapping"].pointer, new.pointer, 3 * 8, 0)
        cuda.runtime.synchronize(0)
        replay()
        pagecore.write_kv(**expected | {"slot_mapping": slots})
    for name in ("key_cache", "value_cache"):
        assert_same_memory(cuda.get(device[name]), expected[name])


@together(("op", "name"), [(op, n) for op in OPS for n in OPS[op] if n in CARRIED - {"pairs"}])
def test_host_arrays_that_need_a_copy_are_refused_in_a_capture(cuda, op, name):
    device = on_device(cuda, op) | {name: OPS[op][name]}
    getattr(pagecore, op)(**device)

    def call(stream: int) -> None:
        with pytest.raises(OPTION, match=f"{name} is on the host and the stream is being captured.*on cuda:0"):
            getattr(pagecore, op)(**device, stream=stream)

    cuda.capture(call)


@together("op", ["copy_blocks", "transfer_blocks"])
def test_pairs_of_the_host_become_part_of_the_graph(cuda, op):
    pairs = {"pairs": [(1, 4), (7, 1)]}
    getattr(pagecore, op)(**on_device(cuda, op) | pairs)  # loads the kernel
    device, host = on_device(cuda, op) | pairs, {name: array.copy() for name, array in OPS[op].items()} | pairs
    replay = cuda.capture(lambda stream: getattr(pagecore, op)(**device, stream=stream))
    replay()
    getattr(pagecore, op)(**host)
    for name in host.keys() - pairs.keys():
        np.testing.assert_array_equal(cuda.get(device[name]), host[name])
