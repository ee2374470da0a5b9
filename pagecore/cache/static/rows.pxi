"""Rows of an update: its arrays with merged axes, copies of those that cannot be merged, and writes of them."""

from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor, new_tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.arguments._arguments cimport StoredCache
from pagecore.ops.cpu.calls._calls cimport write_kv as run_write

from pagecore.ops import write_kv

cdef enum:
    BATCH = 0
    HEADS = 1
    TOKENS = 2
    DIM = 3


cdef class RowWrite:
    """A write of merged rows whose arguments are all made: without a format, `run` allocates nothing on the host."""

    cdef Tensor key
    cdef Tensor value
    cdef Tensor slots
    cdef StoredCache keys
    cdef StoredCache values
    cdef dict options  # of write_kv: stream, factors, format and scales; None without any

    cdef int run(self) except -1:
        if self.options is None:
            return run_write(self.key, self.value, self.keys, self.values, self.slots, None, None, False)
        write_kv(self.key, self.value, self.keys.codes, self.values.codes, self.slots, **self.options)
        return 0


cdef Tensor copied(Tensor tensor, bint tokens_first=False):
    """Return a copy ``[batch, heads, tokens, dim]``; with `tokens_first`, batch and tokens can be merged."""
    cdef int64_t shape[4]
    cdef ArrayView view
    cdef Tensor copy
    cdef int heads = TOKENS if tokens_first else HEADS
    cdef int tokens = HEADS if tokens_first else TOKENS
    shape[BATCH], shape[heads] = tensor.shape_[BATCH], tensor.shape_[HEADS]
    shape[tokens], shape[DIM] = tensor.shape_[TOKENS], tensor.shape_[DIM]
    copy = new_tensor(4, shape, tensor.dtype_code, False)
    view = copy.view()
    view.shape[HEADS], view.strides[HEADS] = copy.shape_[heads], copy.strides_[heads]
    view.shape[TOKENS], view.strides[TOKENS] = copy.shape_[tokens], copy.strides_[tokens]
    copy = tensor_of(view, copy.owner)
    copy.numpy()[...] = tensor.numpy()
    return copy


cdef bint is_merged(Tensor tensor, int axis) noexcept:
    """Return True if the axes batch and `axis` can be merged into one."""
    if tensor.shape_[BATCH] <= 1 or tensor.shape_[axis] == 1:
        return True
    return tensor.strides_[BATCH] == tensor.shape_[axis] * tensor.strides_[axis]


cdef Tensor merged(Tensor tensor, int axis, int64_t first, int64_t batch):
    """Return the view ``[batch * axis, the other axis, dim]`` of `batch` sequences from `first` on."""
    cdef ArrayView view = tensor.view()
    cdef int other = HEADS + TOKENS - axis
    view.data += first * tensor.strides_[BATCH]
    view.ndim = 3
    view.shape[0] = batch * tensor.shape_[axis]
    view.strides[0] = tensor.strides_[BATCH if tensor.shape_[axis] == 1 else axis]
    view.shape[1], view.strides[1] = tensor.shape_[other], tensor.strides_[other]
    view.shape[2], view.strides[2] = tensor.shape_[DIM], tensor.strides_[DIM]
    return tensor_of(view, tensor.owner)
