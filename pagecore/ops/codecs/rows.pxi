"""Rows of arrays: checks of their last axis, and views of them with one leading axis."""

from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.arguments._arguments cimport check_aligned, check_last_axis

import numpy as np

from pagecore.errors import ShapeError


cdef int check_rows(Tensor tensor, str name) except -1:
    if tensor.ndim == 0:
        raise ShapeError(f"{name} has no axes; it must be [..., D]")
    check_last_axis(tensor, name)
    return check_aligned(tensor, name)


cdef Tensor with_last_axis(Tensor tensor):
    cdef ArrayView view = tensor.view()
    view.shape[tensor.ndim], view.strides[tensor.ndim] = 1, tensor.itemsize
    view.ndim = tensor.ndim + 1
    return tensor_of(view, tensor)


cdef Tensor merged_rows(Tensor tensor):
    """Return the tensor as [rows, last axis]; a copy if its leading axes have no common stride."""
    cdef int64_t stride = 0, count = 1
    cdef int i
    for i in range(tensor.ndim - 2, -1, -1):
        if tensor.shape_[i] == 1:
            continue
        if count > 1 and tensor.strides_[i] != stride * count:
            return as_tensor(np.ascontiguousarray(tensor.numpy()).reshape(-1, tensor.shape_[tensor.ndim - 1]))
        if count == 1:
            stride = tensor.strides_[i]
        count *= tensor.shape_[i]
    cdef ArrayView view = tensor.view()
    view.ndim = 2
    view.shape[1], view.strides[1] = tensor.shape_[tensor.ndim - 1], tensor.itemsize
    view.shape[0], view.strides[0] = count, stride
    return tensor_of(view, tensor.owner)
