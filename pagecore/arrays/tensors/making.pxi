"""New tensors, and facts about their layout."""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

from pagecore.arrays.tensors._memory cimport Allocation, allocate
from pagecore.arrays.views.array_view cimport (
    ArrayView,
    checked_element_count,
    element_count,
    is_contiguous,
    item_bytes,
    set_contiguous_strides,
)


cdef Tensor tensor_of(const ArrayView& view, object owner):
    cdef Tensor tensor = Tensor.__new__(Tensor)
    tensor.data = view.data
    tensor.ndim = view.ndim
    memcpy(tensor.shape_, view.shape, sizeof(tensor.shape_))
    memcpy(tensor.strides_, view.strides, sizeof(tensor.strides_))
    tensor.dtype_code = view.dtype
    tensor.itemsize = item_bytes(view)
    tensor.device_type = view.device_type
    tensor.device_id = view.device_id
    tensor.readonly = view.readonly
    tensor.owner = owner
    return tensor


cdef Tensor new_tensor(int ndim, const int64_t* shape, int dtype_code, bint zeroed):
    cdef ArrayView view
    cdef int i
    view.dtype = dtype_code
    cdef int64_t size = checked_element_count(ndim, shape, item_bytes(view))
    view.ndim = ndim
    for i in range(ndim):
        view.shape[i] = shape[i]
    set_contiguous_strides(view)
    cdef Allocation memory = allocate(<size_t>(size * item_bytes(view)), zeroed)
    view.data = memory.memory.data()
    return tensor_of(view, memory)


cdef bint last_axis_contiguous(Tensor tensor) noexcept:
    cdef int last = tensor.ndim - 1
    return last < 0 or tensor.shape_[last] <= 1 or tensor.strides_[last] == tensor.itemsize


cdef bint contiguous(Tensor tensor) noexcept:
    return is_contiguous(tensor.view())


cdef int64_t size_of(Tensor tensor) noexcept:
    return element_count(tensor.ndim, tensor.shape_)
