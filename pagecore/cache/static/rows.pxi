"""Rows of an update: its arrays with merged axes, copies of those that cannot be read, and writes of them."""

from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor, new_tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.arguments._arguments cimport (
    Place,
    StoredCache,
    find_place,
    given_factor,
    plain_cache,
    read_format,
    scale_numbers,
    stored_cache,
)
from pagecore.ops.cpu.calls._calls cimport write_kv as run_write

from pagecore.ops import write_kv

cdef enum:
    BATCH = 0
    HEADS = 1
    TOKENS = 2
    DIM = 3


cdef class RowWrite:
    """A write of merged rows whose arguments are all made: `run` allocates nothing on the host."""

    cdef Tensor key
    cdef Tensor value
    cdef Tensor slots
    cdef StoredCache keys    # None on a device, as the other arguments of a write on the host
    cdef StoredCache values
    cdef Tensor key_scale    # given factors
    cdef Tensor value_scale
    cdef bint four_over_six
    cdef dict options        # other arguments of write_kv on a device: caches, stream, factors, format and scales

    cdef int read(self, Tensor key_cache, Tensor value_cache, dict options) except -1:
        """Make the arguments of a write on the host; `options` are those of write_kv with a format, else None."""
        cdef Place place
        cdef int64_t num_heads = key_cache.shape_[2]
        if options is None:
            self.keys, self.values = plain_cache(key_cache), plain_cache(value_cache)
            return 0
        find_place(&place, self.key, "key", None, None)
        key_scale, value_scale = options.get("key_scale"), options.get("value_scale")
        self.keys = stored_cache(key_cache, key_scale, "key", &place)
        self.values = stored_cache(value_cache, value_scale, "value", &place)
        self.four_over_six = read_format(options.get("format"), self.keys, self.values)
        key_scale = given_factor(self.keys, key_scale, options.get("key_global_scale", 1.0), "key")
        value_scale = given_factor(self.values, value_scale, options.get("value_global_scale", 1.0), "value")
        self.key_scale = scale_numbers(key_scale, "key_scale", num_heads, True, &place)
        self.value_scale = scale_numbers(value_scale, "value_scale", num_heads, True, &place)
        return 0

    cdef int run(self) except -1:
        if self.keys is None:
            write_kv(self.key, self.value, slot_mapping=self.slots, **self.options)
            return 0
        return run_write(
            self.key, self.value, self.keys, self.values, self.slots, self.key_scale, self.value_scale,
            self.four_over_six)


cdef Tensor copied(Tensor tensor):
    """Return a C-contiguous copy on the host."""
    cdef Tensor copy = new_tensor(4, tensor.shape_, tensor.dtype_code, False)
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
