"""Random invalid arguments of every public function of ops and arrays: a typed error that names them, or a result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import pagecore
from pagecore import arrays, ops
from pagecore.errors import PagecoreError
from tests.ops.cases import snapshot

CALLS = 2000


class NoRepr:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no repr")


def raising(*names: str) -> Any:
    """Return an object with these special methods, each of which raises."""

    def fail(self: object, *_: object, **__: object) -> Any:
        raise ZeroDivisionError("hostile")

    return type("Raising", (), dict.fromkeys(names, fail))()


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def foreign_values(random: np.random.Generator) -> Iterator[Any]:
    """Yield invalid arguments, new each time."""
    shape = tuple(int(n) for n in random.integers(0, 4, random.integers(0, 6)))
    yield from (None, "text", "", b"bytes", bytearray(b"1234"), memoryview(b"1234"), 3, -1, 0, 2**70, -(2**70), True)
    yield from (3.5, float("nan"), float("inf"), -0.0, 1j, Decimal(2), Fraction(1, 3), object(), type, print, ...)
    yield from ([], [[]], [1, [2]], [[1, 2], [3]], ["a"], [None], [2**70], [1.5], (), (1, 2, 3), {}, {1, 2}, range(3))
    yield from (np.float32(1), np.int64(-3), np.bool_(True), np.datetime64("2020-01-01"), np.str_("a"))
    yield np.array([None, 1], object)
    yield np.array(["a", "b"])
    yield np.zeros(shape, np.complex64)
    yield np.zeros(shape, [("a", "i4")])
    yield np.zeros(shape, "M8[s]")
    yield np.zeros(shape)
    yield np.zeros(shape, np.int16)
    yield np.zeros(shape, ">f4")
    yield np.zeros(shape, ">i8")
    yield np.zeros(shape, ml_dtypes.float8_e4m3fn)
    yield np.full(shape, 2**63 + 1, np.uint64)
    yield np.full(shape, -(2**62), np.int64)
    yield np.full(shape, np.nan, np.float32)
    yield np.zeros(shape, np.int32)
    yield np.zeros(shape, np.bool_)
    yield np.zeros((0, 4, 8), np.float32)
    yield np.ma.masked_array(f32(3, 4, 8), True)
    yield np.zeros((1,) * 12, np.float32)
    yield f32(3, 4, 8)[::-1]
    yield f32(3, 4, 8)[..., ::-1]
    yield f32(8, 4, 3).transpose()
    yield np.broadcast_to(f32(1, 1, 1, 8), (6, 4, 2, 8))
    yield as_strided(f32(400), (6, 4, 2, 8), (4, 4, 4, 4))
    yield np.zeros(4 * 96 + 1, np.uint8)[1:].view(np.float32).reshape(3, 4, 8)
    yield arrays.zeros(shape, "int8")
    yield arrays.zeros(shape, "bfloat16")
    yield arrays.as_dtype("float32")
    yield [f32(3), "text"]
    yield NoRepr()
    for name in ("__index__", "__float__", "__int__", "__bool__", "__len__", "__iter__", "__array__", "__str__"):
        yield raising(name)
    yield raising("__dlpack__", "__dlpack_device__")
    yield raising("__getattr__")
    yield raising("__getitem__", "__len__")
    yield raising("__cuda_stream__")
    yield type("Interface", (), {"__array_interface__": {"version": 3}})()
    yield type("Interface", (), {"__cuda_array_interface__": {"data": 3}})()


def index(*numbers: Any) -> Any:
    return np.array(numbers, np.int32)


def operations() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each function with valid arguments, new each time."""
    cache, packed = f32(6, 4, 2, 8), f32(7, 2, 8)
    batch = {"block_table": index([1, 2], [3, 4]), "seq_lens": index(5, 2), "rows": index(0, 1), "stream": None}
    parts = {"out_a": f32(3, 4, 8), "lse_a": f32(3, 4), "out_b": f32(3, 4, 8), "lse_b": f32(3, 4)}
    heads = {"num_query_heads": 4, "num_kv_heads": 2, "causal": True, "window": None, "batch_invariant": False}
    attention = {
        "query": f32(3, 4, 8),
        "key_cache": cache,
        "value_cache": cache.copy(),
        **batch,
        "cu_query_lens": index(0, 2, 3),
        "scale": 1.0,
        "causal": True,
        "window": 3,
        "softcap": 0.0,
        "sinks": f32(4),
        "alibi_slopes": f32(4),
        "mask": np.ones(2 * 5 + 2, np.bool_),
        "key_scale": 1.0,
        "value_scale": f32(2),
        "out": f32(3, 4, 8),
        "return_lse": False,
        "plan": None,
    }
    writing = {"key": f32(3, 2, 8), "value": f32(3, 2, 8), "key_cache": cache, "value_cache": cache.copy()}
    plan = {"cu_query_lens": index(0, 2, 3), "seq_lens": index(5, 2), **heads, "num_workers": 2, "device": None}
    shown = arrays.zeros((2, 3))
    return {
        "paged_attention": (ops.paged_attention, attention),
        "write_kv": (
            ops.write_kv,
            writing | {"slot_mapping": index(4, 5, -1), "key_scale": 1.0, "value_scale": f32(2), "stream": None},
        ),
        "merge_attention": (ops.merge_attention, parts | {"out": f32(3, 4, 8), "lse": f32(3, 4), "stream": None}),
        "merge_attention_parts": (
            ops.merge_attention_parts,
            {
                "outs": f32(5, 4, 8),
                "lses": f32(5, 4),
                "cu_parts": index(0, 2, 2, 5),
                "out": f32(3, 4, 8),
                "lse": f32(3, 4),
            },
        ),
        "gather_blocks": (ops.gather_blocks, {"cache": cache, **batch, "out": packed}),
        "scatter_blocks": (ops.scatter_blocks, {"values": packed, "cache": cache, **batch}),
        "transfer_blocks": (
            ops.transfer_blocks,
            {"source_caches": [cache], "target_caches": [cache.copy()], "pairs": index([1, 2]), "stream": None},
        ),
        "copy_blocks": (ops.copy_blocks, {"caches": [cache], "pairs": index([1, 2]), "stream": None}),
        "plan_attention": (ops.plan_attention, plan | {"out": None, "stream": None}),
        "AttentionPlan": (
            ops.AttentionPlan,
            heads | {"num_workers": 2, "device": "cpu", "max_sequences": None, "max_tokens": None},
        ),
        "debug": (lambda on: ops.debug(on) and ops.debug(None), {"on": False}),
        "set_num_threads": (pagecore.set_num_threads, {"n": 1}),
        "set_isa": (pagecore.set_isa, {"name": None}),
        "as_tensor": (arrays.as_tensor, {"obj": f32(3)}),
        "as_dtype": (arrays.as_dtype, {"dtype": "int8"}),
        "DType": (arrays.DType, {"name": "int8"}),
        "empty": (arrays.empty, {"shape": (2, 3), "dtype": "int8", "device": "cpu", "stream": None}),
        "zeros": (arrays.zeros, {"shape": 3, "dtype": "int8", "device": "cpu", "stream": None}),
        "strided": (
            arrays.strided,
            {"buffer": f32(8), "shape": (2, 2), "strides_bytes": (8, 4), "byte_offset": 0, "dtype": "float32"},
        ),
        "like": (arrays.like, {"tensor": f32(3), "example": f32(3)}),
        "reshape": (lambda shape: shown.reshape(*[shape]), {"shape": (3, 2)}),
        "transpose": (lambda axes: shown.transpose(*[axes]), {"axes": (1, 0)}),
        "index": (lambda index: shown[index], {"index": 1}),
        "assign": (lambda value: shown.__setitem__(0, value), {"value": 1.0}),
        "__dlpack__": (shown.__dlpack__, {"stream": None, "max_version": (1, 0), "dl_device": None, "copy": None}),
    }


# Functions whose errors describe the argument without its name.
UNNAMED = {"as_tensor", "as_dtype", "DType", "like", "index", "assign", "__dlpack__", "set_isa", "debug"}
UNNAMED |= {"set_num_threads", "strided", "empty", "zeros", "reshape", "transpose"}


# For an argument, the other argument that an error may name if the two do not match.
PARTNERS = {
    "query": ("out",),
    "key_cache": ("query", "key"),
    "value_cache": ("value",),
    "block_table": ("block table",),
    "cu_query_lens": ("mask",),
    "cu_parts": ("out", "outs"),
    "cache": ("block table", "blocks", "out", "values"),
    "caches": ("cache 0",),
    "source_caches": ("smallest source cache",),
    "target_caches": ("smallest target cache",),
}


def names(error: PagecoreError, argument: str) -> bool:
    """Return True if a message names an argument, or the one that it does not match."""
    return any(name in str(error) for name in (argument, *PARTNERS.get(argument, ())))


def draw(random: np.random.Generator) -> tuple[str, Callable[..., Any], dict[str, Any], list[str]]:
    """Return a function, its arguments, and the names of the invalid ones, mostly one."""
    functions = list(operations())
    name = functions[int(random.integers(len(functions) if random.random() < 0.5 else 8))]
    call, given = operations()[name]
    changed = random.choice(list(given), size=min(len(given), 1 + int(random.random() < 0.2)), replace=False).tolist()
    for each in changed:
        values = list(foreign_values(random))
        value = values[int(random.integers(len(values)))]
        given[each] = [value] if random.random() < 0.05 else value
    return name, call, given, changed


def attempt(
    name: str, call: Callable[..., Any], given: dict[str, Any], changed: list[str], *arguments: Any
) -> PagecoreError | None:
    """Return the typed error of a call, if any; an error of another type fails the test."""
    try:
        call(*arguments, **given)
    except PagecoreError as error:
        return error
    except Exception as error:
        kinds = {each: type(given[each]).__name__ for each in changed}
        pytest.fail(f"{name}({kinds}) raised {type(error).__name__}: {error}")
    return None


@pytest.fixture
def threads():
    before = pagecore.num_threads()
    yield
    pagecore.set_num_threads(before)
    ops.debug(None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of NumPy, on what it makes of nonsense
@pytest.mark.parametrize("seed", range(4))
def test_foreign_arguments_are_refused_by_name_and_change_nothing(threads, seed):
    random = np.random.default_rng(seed)
    refused = 0
    for _ in range(CALLS // 4):
        name, call, given, changed = draw(random)
        held = [
            array
            for value in given.values()
            for array in (value if isinstance(value, list) else [value])
            if type(array) is np.ndarray and not array.dtype.hasobject
        ]
        unchanged = snapshot(*held)
        error = attempt(name, call, given, changed)
        if error is None:
            continue
        refused += 1
        assert unchanged(), (name, changed)
        assert name in UNNAMED or any(names(error, each) for each in changed), (name, changed, str(error))
        assert len(str(error)) < 700, (name, changed)
    assert refused > CALLS // 8


def test_every_argument_meets_every_foreign_value_of_attention():
    """The arguments that most code uses, because random calls do not cover every pair."""
    random = np.random.default_rng(9)
    _, given = operations()["paged_attention"]
    for name, value in itertools.product(given, foreign_values(random)):
        call, good = operations()["paged_attention"]
        error = attempt("paged_attention", call, good | {name: value}, [name])
        assert error is None or names(error, name), (name, str(error))
