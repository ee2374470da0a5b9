"""Index arrays (slots, block ids, lengths, rows) and masks: conversion and checks. Contents are not checked here."""

from libc.stdint cimport INT64_MAX

from pagecore.arrays.dtypes.codes cimport BOOL, CPU, INT32, INT64
from pagecore.arrays.tensors._tensor cimport Tensor, last_axis_contiguous

import numpy as np

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedDtype, shown


cdef Tensor viewed(object array, str name):
    if isinstance(array, (list, tuple)):
        return None
    try:
        return any_tensor(array, name)
    except UnsupportedDtype:
        return None


cdef Tensor index_tensor(object array, str name, int ndim, str axes, const Place* place):
    return to_device(given_indices(array, name, ndim, axes, place), name, place)


cdef Tensor given_indices(object array, str name, int ndim, str axes, const Place* place):
    # Lists, other integers and tables without a contiguous last axis are copied on the host; the rest is viewed.
    cdef Tensor tensor = viewed(array, name)
    if tensor is not None and tensor.device_type != CPU:
        check_reachable(tensor, name, place)
        return device_indices(tensor, name, ndim, axes)
    if tensor is None or not INT32 <= tensor.dtype_code <= INT64:
        tensor = copy_integers(array, name)
    check_rank(tensor, name, ndim, axes)
    if ndim > 1 and not last_axis_contiguous(tensor) or not is_aligned(tensor):
        tensor = copy_integers(tensor, name)
    return tensor


cdef Tensor device_indices(Tensor tensor, str name, int ndim, str axes):
    """Check indices in device memory. They are never copied: that would take memory which the caller plans better."""
    if not INT32 <= tensor.dtype_code <= INT64:
        raise UnsupportedDtype(f"{name} is {tensor.dtype} on {tensor.device}; it must be int32 or int64 there")
    check_rank(tensor, name, ndim, axes)
    if ndim > 1:
        check_last_axis(tensor, name)
    check_aligned(tensor, name)
    return tensor


cdef Tensor copy_integers(object array, str name):
    try:
        values = np.asarray(array.numpy() if type(array) is Tensor else array)
    except MemoryError as error:
        raise NotEnoughMemory(f"{name}: the host has no memory for a copy as an array of integers") from error
    except Exception as error:
        raise ShapeError(f"{name} is not an array of integers: {shown(error)}") from error
    if values.size == 0:
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} holds {values.dtype}; it must hold integers that fit 64 bits")
    if values.dtype.kind == "u" and values.max(initial=0) > INT64_MAX:
        raise ShapeError(f"{name} holds {values.max()}; it must fit int64")
    return any_tensor(np.array(values, dtype=np.int64, order="C"), name)


cdef Tensor flat_mask(object array, const Place* place):
    cdef Tensor tensor
    if isinstance(array, (list, tuple)):
        try:
            array = np.asarray(array) if array else np.zeros(0, np.bool_)
        except MemoryError:
            raise
        except Exception as error:
            raise ShapeError(f"mask is not an array of bool: {shown(error)}") from error
    tensor = any_tensor(array, "mask")
    if tensor.device_type != CPU:
        check_reachable(tensor, "mask", place)
    if tensor.dtype_code != BOOL:
        raise UnsupportedDtype(f"mask is {tensor.dtype}; it must be bool, True where a query attends: pass mask != 0")
    check_rank(tensor, "mask", 1, "flat, [query_len, seq_len] of every sequence in order")
    check_last_axis(tensor, "mask")
    return tensor
