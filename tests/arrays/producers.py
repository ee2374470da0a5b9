"""A DLPack producer made with ctypes; it counts the calls of its deleter, and every field can be made invalid."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = [ctypes.py_object]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
VERSIONED, UNVERSIONED = b"dltensor_versioned", b"dltensor"


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Unversioned(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


def read_capsule(capsule: Any) -> Versioned | Unversioned:
    """Return the DLTensor in a capsule without consuming it; valid while the capsule lives."""
    name = api.PyCapsule_GetName(capsule)
    form = Versioned if name == VERSIONED else Unversioned
    return form.from_address(api.PyCapsule_GetPointer(capsule, name))


def capsule_name(capsule: Any) -> bytes:
    return api.PyCapsule_GetName(capsule)


# A capsule in its destructor must not become a Python object again, so the argument is an address.
pointer_of_dying = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", api))


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def destroy(capsule: int) -> None:
    """Destructor of a capsule: release a tensor that no consumer took."""
    for name, form in ((VERSIONED, Versioned), (UNVERSIONED, Unversioned)):
        if api.PyCapsule_IsValid(capsule, name):
            address = pointer_of_dying(capsule, name)
            form.from_address(address).deleter(address)


# A managed tensor can outlive the test that created it, so producers are never freed.
EVERY: list[Producer] = []


class Producer:
    """A producer of float32 0 to 23 by default; each attribute of the DLTensor can be overridden."""

    def __init__(
        self,
        lengths: Sequence[int] = (2, 3, 4),
        strides: Sequence[int] | None = (12, 4, 1),
        *,
        versioned: bool = True,
        knows_max_version: bool = True,
        major: int = 1,
        flags: int = 0,
        device: tuple[int, int] = (1, 0),
        **fields: Any,
    ) -> None:
        EVERY.append(self)
        self.memory = (ctypes.c_float * 24)(*range(24))
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        self.device = device
        self.knows_max_version = knows_max_version
        self.name = VERSIONED if versioned else UNVERSIONED
        self.managed = Versioned() if versioned else Unversioned()
        if versioned:
            self.managed.major, self.managed.minor, self.managed.flags = major, 0, flags
        self.deleter = DELETER(self.delete)
        self.managed.deleter = self.deleter
        self.axes = (ctypes.c_int64 * max(len(lengths), 1))(*lengths), (ctypes.c_int64 * 16)(*(strides or ()))
        tensor = self.managed.tensor
        tensor.data, (tensor.device_type, tensor.device_id) = ctypes.addressof(self.memory), device
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(lengths), 2, 32, 1
        tensor.shape = ctypes.cast(self.axes[0], ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(self.axes[1], ctypes.POINTER(ctypes.c_int64))
        for field, value in fields.items():
            setattr(tensor, field, value)

    def delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.memory)

    def capsule(self) -> Any:
        return api.PyCapsule_New(ctypes.addressof(self.managed), self.name, ctypes.cast(destroy, ctypes.c_void_p))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        if not self.knows_max_version and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.capsule()
