from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor

# Return new device memory, with undefined elements or zeros. `stream` is the handle of the stream that uses it; None
# makes the call wait until every stream may use the memory.
cdef Tensor new_cuda_tensor(
    int ndim, const int64_t* shape, int code, int device, object stream, bint zeroed)
