from __future__ import annotations

import pickle
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pagecore.arrays
from pagecore.arrays import DType, as_dtype
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import UnsupportedDtype
from tests.together import together

# name: DLPack code and bits, bytes, what CuPy stores; written out so that a slip in the table shows.
TABLE = {
    "float32": ((2, 32), 4, "float32"),
    "float16": ((2, 16), 2, "float16"),
    "bfloat16": ((4, 16), 2, "uint16"),
    "float8_e4m3fn": ((10, 8), 1, "uint8"),
    "float8_e5m2": ((12, 8), 1, "uint8"),
    "int8": ((0, 8), 1, "int8"),
    "uint8": ((1, 8), 1, "uint8"),
    "int32": ((0, 32), 4, "int32"),
    "int64": ((0, 64), 8, "int64"),
    "bool": ((6, 8), 1, "bool"),
}


def abbreviated(name):
    """Return the native name: "f32" for "float32", "bf16" for "bfloat16"."""
    return re.sub(r"(float|uint|int)(?=\d)", lambda kind: kind[1][0], name).replace("_", "")


def test_the_table_is_in_the_order_of_the_native_enum():
    header = (Path(pagecore.arrays.__file__).parent / "dtypes" / "dtype.hpp").read_text()
    enum = re.findall(r"^  (\w+) = (\d+),$", header, re.MULTILINE)
    assert [int(code) for _, code in enum] == list(range(10))
    assert [name.lower() for name, _ in enum] == [abbreviated(name) for name in TABLE]
    assert tuple(TABLE) == DTYPES
    assert [dtype.code for dtype in DTYPES] == list(range(10))


@together("name", TABLE)
def test_a_dtype_is_its_name_and_knows_what_others_call_it(name):
    dtype = DType(name)
    dlpack, itemsize, cupy = TABLE[name]
    assert dtype == name
    assert f"{dtype}" == str(dtype) == name
    assert hash(dtype) == hash(name)
    assert (dtype.dlpack, dtype.itemsize, dtype.cupy) == (dlpack, itemsize, np.dtype(cupy))
    assert dtype.numpy == np.dtype(getattr(ml_dtypes, name, name))
    assert dtype.numpy.itemsize == itemsize
    assert as_dtype(dtype) is DType(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype
    assert np.zeros(2, dtype).dtype == dtype.numpy


@together("name", TABLE)
def test_every_spelling_of_numpy_is_recognised(name):
    dtype = DType(name)
    for spelling in (name, dtype.numpy, dtype.numpy.type, np.zeros(1, dtype.numpy).dtype):
        assert as_dtype(spelling) is dtype


def test_equal_dtypes_of_other_kinds_are_recognised():
    assert as_dtype(np.dtype("longlong")) == as_dtype(int) == "int64"
    assert as_dtype(bool) == "bool"
    assert as_dtype("f2") == as_dtype("<f2") == "float16"
    assert as_dtype(np.dtype("f4", metadata={"of": "no matter"})) == "float32"


@pytest.mark.parametrize("name", TABLE)
def test_torch_dtypes_are_recognised(torch, name):
    assert as_dtype(getattr(torch, name)) is DType(name)


@pytest.mark.parametrize("name", TABLE)
def test_jax_dtypes_are_recognised(jax, name):
    assert as_dtype(getattr(jax.numpy, name)) is DType(name)
    assert as_dtype(jax.numpy.dtype(name)) is DType(name)


class Hostile:
    def __repr__(self):
        raise RuntimeError("no repr")

    @property
    def dtype(self):
        raise RuntimeError("no dtype")


@together(
    "wrong",
    [
        *(None, "float64", "", "bf16", "f4,f4", "x" * 10_000, float, complex, object, str, np.float64, np.uint32),
        *(np.dtype(">f4"), np.dtype("V2"), np.dtype("(2,)f4"), ml_dtypes.float8_e4m3, ml_dtypes.int4, [("a", "f4")]),
        *(np.dtype([(f"field{n}", "f4") for n in range(99)]), np.dtype(("f4,f4", (2,)))),
        *(np.zeros(3, "f4"), 4, 2.0, [], {}, Hostile(), Hostile),
    ],
)
def test_anything_else_is_refused_with_the_dtypes_there_are(wrong):
    with pytest.raises(UnsupportedDtype, match="bfloat16") as raised:
        as_dtype(wrong)
    assert len(str(raised.value)) < 400
    with pytest.raises(UnsupportedDtype):
        DType(wrong)


def test_other_dtypes_of_torch_are_refused(torch):
    for wrong in (torch.float64, torch.complex64, torch.uint16):
        with pytest.raises(UnsupportedDtype):
            as_dtype(wrong)
