# What the ops demand of their arguments; see _checks.pyx. `name` is the argument's, for messages.
from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor


cdef enum:
    FLOAT32 = 0  # in the dtype table
    LAST_FLOAT = 2  # float32, float16, bfloat16


cdef Tensor host_tensor(object array, str name)

# float32, float16 or bfloat16 of `ndim` axes, aligned, last axis contiguous, no axis from `first_full` on empty.
cdef Tensor float_tensor(object array, str name, int ndim, int first_full, str axes)
cdef Tensor cache_tensor(object array, str name)

# int32 or int64 of `ndim` axes; of two axes the last is contiguous.
cdef Tensor index_tensor(object array, str name, int ndim, str axes)

# One number for each head, in any of the three float dtypes.
cdef Tensor head_numbers(object array, str name, int64_t num_heads)

# The same from a single number too; None where it changes nothing.
cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides)

cdef Tensor flat_mask(object array)
cdef double finite_number(object number, str name) except? -1
cdef int read_window(object window, int64_t* left, int64_t* right) except -1
cdef int check_caches(Tensor key_cache, Tensor value_cache) except -1
cdef int check_aligned(Tensor tensor, str name) except -1
cdef int check_rank(Tensor tensor, str name, int ndim, str axes) except -1
cdef int check_last_axis(Tensor tensor, str name) except -1
cdef int check_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1
cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1
cdef int check_writable(Tensor tensor, str name) except -1
cdef int check_no_stream(object stream) except -1
