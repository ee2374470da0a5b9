"""Every kind of array, in every dtype and form, given to every consumer: shared memory, or the documented error.

A cell is a producer, a form, a dtype and a consumer. Arrays that a producer cannot make (JAX arrays with strides) have
no cell. The table REFUSED lists the cells that a consumer refuses; in every other cell it views the producer's memory.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagecore import ops
from pagecore.arrays import Tensor, as_tensor, empty, like
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.capabilities import require

ROWS, COLUMNS = 4, 8
NOT_OF_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
TYPECODES = {"float32": "f", "int8": "b", "uint8": "B", "int32": "i", "int64": "q"}


# ---- forms: NumPy arrays from which the producers make theirs


def memory(dtype: Any, *shape: int) -> np.ndarray:
    """Return a 64-byte aligned array whose neighbours differ, with numbers that every dtype represents."""
    block = empty(shape, dtype).numpy()
    block[...] = (np.arange(block.size) * 3 % 7).reshape(shape)
    return block


def frozen(block: np.ndarray) -> np.ndarray:
    block.flags.writeable = False
    return block


def off_by_a_byte(dtype: Any) -> np.ndarray:
    whole = memory("uint8", dtype.itemsize * ROWS * COLUMNS + 1)
    block = whole[1:].view(dtype.numpy).reshape(ROWS, COLUMNS)
    block[...] = memory(dtype, ROWS, COLUMNS)
    return block


FORMS: dict[str, Callable[[Any], np.ndarray]] = {
    "contiguous": lambda dtype: memory(dtype, ROWS, COLUMNS),
    "every second row": lambda dtype: memory(dtype, 2 * ROWS, COLUMNS)[::2],
    "every second column": lambda dtype: memory(dtype, ROWS, 2 * COLUMNS)[:, ::2],
    "backwards": lambda dtype: memory(dtype, ROWS, COLUMNS)[::-1],
    "read-only": lambda dtype: frozen(memory(dtype, ROWS, COLUMNS)),
    "empty": lambda dtype: memory(dtype, 0, COLUMNS),
    "0-d": memory,
    "off by an element": lambda dtype: memory(dtype, ROWS * COLUMNS + 1)[1:].reshape(ROWS, COLUMNS),
    "off by a byte": off_by_a_byte,
}


# ---- producers: an array of a framework over the form, and the address of its memory; None if it cannot be made


@dataclass
class Made:
    thing: Any
    pointer: int
    readonly: bool = False


def of(thing: Any, block: np.ndarray) -> Made:
    return Made(thing, block.ctypes.data, not block.flags.writeable)


def make_torch(block: np.ndarray, dtype: str, form: str) -> Made | None:
    if form in ("read-only", "backwards"):
        return None
    torch = require("torch")
    bits = block.view(f"u{block.itemsize}") if dtype in NOT_OF_NUMPY else block
    return of(torch.from_numpy(bits).view(getattr(torch, dtype)), block)


def make_jax(block: np.ndarray, dtype: str, form: str) -> Made | None:
    if form not in ("contiguous", "empty", "0-d"):
        return None
    jax = require("jax")
    with jax.enable_x64(True):
        thing = jax.numpy.array(block)
    return Made(thing, thing.unsafe_buffer_pointer(), readonly=True)


class Exporter:
    """An object with only the two methods of DLPack."""

    def __init__(self, block: np.ndarray) -> None:
        tensor = as_tensor(block)
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


class Interface:
    """An object with only the array interface."""

    def __init__(self, block: np.ndarray) -> None:
        self.__array_interface__ = block.__array_interface__
        self.block = block


def make_old_capsule(block: np.ndarray, dtype: str, form: str) -> Made | None:
    return None if form == "read-only" else of(as_tensor(block).__dlpack__(), block)


def make_array(block: np.ndarray, dtype: str, form: str) -> Made | None:
    if dtype not in TYPECODES or form not in ("contiguous", "empty"):
        return None
    thing = array.array(TYPECODES[dtype], block.ravel().tolist())
    return Made(thing, thing.buffer_info()[0])


def make_bytes(block: np.ndarray, dtype: str, form: str) -> Made | None:
    if dtype != "uint8" or form not in ("contiguous", "empty"):
        return None
    thing = block.tobytes()
    return Made(thing, np.frombuffer(thing or b"\0", np.uint8).ctypes.data, readonly=True)


def in_words_of_numpy(make: Callable[[np.ndarray], Any]) -> Callable[..., Made | None]:
    return lambda block, dtype, form: None if dtype in NOT_OF_NUMPY else of(make(block), block)


PRODUCERS: dict[str, Callable[[np.ndarray, str, str], Made | None]] = {
    "Tensor": lambda block, dtype, form: of(as_tensor(block), block),
    "NumPy": lambda block, dtype, form: of(block, block),
    "torch": make_torch,
    "JAX": make_jax,
    "DLPack": lambda block, dtype, form: of(Exporter(block), block),
    "capsule": lambda block, dtype, form: of(as_tensor(block).__dlpack__(max_version=(1, 0)), block),
    "old capsule": make_old_capsule,
    "array interface": in_words_of_numpy(Interface),
    "memoryview": in_words_of_numpy(memoryview),
    "array.array": make_array,
    "bytes": make_bytes,
}


# ---- consumers: their view of the array, as (pointer, shape, dtype, elements)

Seen = tuple[int, tuple[int, ...], str, Any]


def see(tensor: Tensor) -> Seen:
    assert type(tensor) is Tensor
    return tensor.pointer, tensor.shape, str(tensor.dtype), tensor.tolist()


def see_numpy(shown: np.ndarray) -> Seen:
    return shown.ctypes.data, shown.shape, str(shown.dtype), shown.astype(np.float32).tolist()


def see_torch(tensor: Tensor) -> Seen:
    shown = like(tensor, require("torch").zeros(1))
    return shown.data_ptr(), tuple(shown.shape), str(shown.dtype).removeprefix("torch."), shown.tolist()


def see_jax(tensor: Tensor) -> Seen:
    shown = like(tensor, require("jax").numpy.zeros(1))
    return shown.unsafe_buffer_pointer(), shown.shape, str(shown.dtype), shown.tolist()


def see_reader(tensor: Tensor) -> Seen:
    """Run an operation that copies every block but the null block to new memory."""
    target = empty(tensor.shape, tensor.dtype)
    target[...] = tensor
    blocks = range(1, len(tensor)) if tensor.ndim else []
    for block in blocks:
        target[block] = 0
    ops.transfer_blocks(tensor, target, [(block, block) for block in blocks])
    return tensor.pointer, *see(target)[1:]


def see_writer(tensor: Tensor) -> Seen:
    """Run an operation that copies one block to another, then restore the target."""
    before = tensor.tolist()
    if tensor.ndim == 0 or len(tensor) == 0:
        ops.copy_blocks(tensor, [])
        return see(tensor)
    kept = tensor[1].tolist()
    ops.copy_blocks(tensor, [(2, 1)])
    assert tensor.tolist() == [before[0], before[2], *before[2:]]
    tensor[1] = kept
    return see(tensor)


CONSUMERS: dict[str, Callable[[Tensor], Seen]] = {
    "Tensor": see,
    "NumPy": lambda tensor: see_numpy(np.asarray(tensor)),
    "NumPy by DLPack": lambda tensor: see_numpy(np.from_dlpack(tensor)),
    "buffer": lambda tensor: see_numpy(np.asarray(memoryview(tensor))),
    "capsule": lambda tensor: see(as_tensor(tensor.__dlpack__(max_version=(1, 0)))),
    "old capsule": lambda tensor: see(as_tensor(tensor.__dlpack__())),
    "torch": see_torch,
    "JAX": see_jax,
    "reading op": see_reader,
    "writing op": see_writer,
}


# ---- refusals by consumer: a form, a dtype, "read-only" (arrays of JAX always are), "1-d" (bytes are)
# The first entry that names a cell applies.

NO_FORMAT = dict.fromkeys(NOT_OF_NUMPY, (BufferError, "cannot describe"))
MISPLACED = (UnsupportedOption, "only at a multiple of 64")
WOULD_COPY = (UnsupportedOption, "without a copy")
REFUSED: dict[str, dict[str, tuple[type[Exception] | tuple[type[Exception], ...], str]]] = {
    "NumPy by DLPack": dict.fromkeys(NOT_OF_NUMPY, ((RuntimeError, BufferError), "Unsupported dtype")),  # NumPy's
    "buffer": NO_FORMAT,
    "old capsule": {"read-only": (BufferError, "read-only")},
    "torch": {
        "read-only": (UnsupportedOption, "read-only and torch has no read-only arrays"),
        "backwards": (UnsupportedOption, "torch has no negative strides"),
    },
    "JAX": {
        "read-only": (UnsupportedOption, "read-only and JAX has no read-only arrays"),
        "every second row": WOULD_COPY,
        "every second column": WOULD_COPY,
        "backwards": (UnsupportedOption, "JAX"),  # the last row may start at a multiple of 64 bytes or not
        "off by an element": MISPLACED,
        "off by a byte": MISPLACED,
        "int64": (UnsupportedDtype, "set jax_enable_x64"),
    },
    "reading op": {
        "0-d": (ShapeError, "at least 2 axes"),
        "1-d": (ShapeError, "at least 2 axes"),
    },
    "writing op": {
        "0-d": (ShapeError, "no axes"),
        "read-only": (UnsupportedOption, "read-only"),
    },
}
# malloc may place the memory of array.array at a multiple of 64, which JAX accepts, or not.
PAIRS = [pair for pair in itertools.product(PRODUCERS, CONSUMERS) if pair != ("array.array", "JAX")]


def cells(producer: str) -> Iterator[tuple[Made, np.ndarray, list[str]]]:
    """Yield what a producer makes in every form and dtype, its source array, and its keys in REFUSED."""
    for form, dtype in itertools.product(FORMS, DTYPES):
        block = FORMS[form](dtype)
        made = PRODUCERS[producer](block, str(dtype), form)
        if made is not None:
            names = [form, str(dtype)] + ["read-only"] * made.readonly
            yield made, block, names + ["1-d"] * (producer in ("array.array", "bytes"))


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_every_array_is_viewed_in_place_or_refused_as_documented(producer, consumer):
    refused = REFUSED.get(consumer, {})
    for made, block, names in cells(producer):
        tensor = as_tensor(made.thing)
        assert tensor.readonly == made.readonly, names
        reason = next((refused[name] for name in refused if name in names), None)
        if reason is not None:
            error, words = reason
            with pytest.raises(error, match=words):
                CONSUMERS[consumer](tensor)
            continue
        pointer, shape, dtype, elements = CONSUMERS[consumer](tensor)
        expected = block.ravel() if "1-d" in names else block
        assert (shape, dtype) == (expected.shape, str(block.dtype)), names
        assert elements == expected.astype(np.float32).tolist(), names
        # DLPack exports an empty array with a null pointer.
        assert pointer == made.pointer or block.size == 0, names
