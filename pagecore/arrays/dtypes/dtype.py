"""The dtypes that pagecore stores, and their names in NumPy, CuPy and the frameworks.

The table (name, DLPack code, bits) comes from ``dtype.hpp``. This module adds the NumPy dtypes, with those of ml_dtypes
for bfloat16 and float8. It recognises dtypes of torch and JAX by name and imports neither.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from pagecore.arrays.dtypes._table import dtype_table
from pagecore.errors import UnsupportedDtype, shown

__all__ = ["DTYPES", "DType", "as_dtype", "unsupported_dlpack_dtype"]

# CuPy lacks these dtypes; its arrays hold their bits as unsigned integers.
_CUPY_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex"}


class DType(str):
    """A dtype by its name, e.g. ``DType("bfloat16") == "bfloat16"``; there is one object for each name.

    Raises
    ------
    UnsupportedDtype
        The name is not in the table.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> DType:
        """Return the object of this name."""
        found = _BY_NAME.get(name) if isinstance(name, str) else None
        if found is None:
            raise _unsupported(name)
        return found

    def __repr__(self) -> str:
        return f"DType({str(self)!r})"

    @property
    def code(self) -> int:
        """Index in the table, the C side's ``enum class DType``."""
        return _CODES[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dlpack[1] // 8

    @property
    def dlpack(self) -> tuple[int, int]:
        """(DLDataTypeCode, bits) of DLPack."""
        return _DLPACK[self.code]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; of ml_dtypes for bfloat16 and float8."""
        return _NUMPY[self.code]

    @property
    def cupy(self) -> np.dtype[Any]:
        """The dtype of a CuPy array over this memory: unsigned integers for bfloat16 and float8."""
        return np.dtype(_CUPY_STORAGE.get(self, self))


_TABLE = dtype_table()
DTYPES: Final[tuple[DType, ...]] = tuple(str.__new__(DType, name) for name, _, _ in _TABLE)
_DLPACK = tuple((code, bits) for _, code, bits in _TABLE)
_NUMPY = tuple(np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES)
_CODES = {name: code for code, name in enumerate(DTYPES)}
_BY_NAME: dict[str, DType] = {str(name): name for name in DTYPES}
_BY_NUMPY = dict(zip(_NUMPY, DTYPES, strict=True))


def _unsupported(dtype: object) -> UnsupportedDtype:
    is_simple = isinstance(dtype, np.dtype) and dtype.kind != "V"  # others may have any number of fields
    text = str(dtype) if is_simple else shown(dtype)
    return UnsupportedDtype(f"dtype {text} is not supported; convert to one of {', '.join(DTYPES)}")


def unsupported_dlpack_dtype(code: int, bits: int, lanes: int) -> UnsupportedDtype:
    """Return the error for an array whose DLPack dtype is not in the table."""
    name = f"{_DLPACK_KINDS[code]}{bits}, " if code in _DLPACK_KINDS else ""
    return UnsupportedDtype(
        f"the dtype is {name}in DLPack code {code} of {bits} bits and {lanes} lanes, which is not supported; convert "
        f"to one of {', '.join(DTYPES)}"
    )


def as_dtype(dtype: object) -> DType:
    """Return the DType of a name, or of a dtype of NumPy, ml_dtypes, torch or JAX.

    Parameters
    ----------
    dtype : DType, str, numpy.dtype, type, torch.dtype or a JAX scalar type
        ``"bfloat16"``, ``np.float32``, ``ml_dtypes.bfloat16``, ``torch.float8_e5m2``, ``jnp.int32``; the Python types
        ``int`` and ``bool`` mean int64 and bool.

    Raises
    ------
    UnsupportedDtype
        The dtype is not in the table, its byte order is not the machine's, or the argument is not a dtype (None, an
        array).
    """
    if type(dtype) is DType:
        return dtype
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    if type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        found = _BY_NAME.get(str(dtype).removeprefix("torch."))
    else:
        found = _from_numpy(dtype)
    if found is None:
        raise _unsupported(dtype)
    return found


def _from_numpy(dtype: Any) -> DType | None:
    # np.dtype() accepts almost anything (None is float64, a list is a record), so only names and types may pass.
    if not isinstance(dtype, (np.dtype, str, type)):
        return None
    try:
        return _BY_NUMPY.get(np.dtype(dtype))
    except Exception:  # a class whose attributes raise is not a dtype either
        return None
