# What the ops demand of their arguments; see _checks.pyx. `name` is the argument's, for messages.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor


cdef enum:
    FLOAT32 = 0  # in the dtype table
    LAST_FLOAT = 2  # float32, float16, bfloat16
    CPU = 1  # device types, by the numbers of DLPack
    CUDA = 2


# Where a call runs: the device of its first array, and there the stream.
cdef struct Place:
    int device_type
    int device_id
    size_t stream  # a handle of CUDA's, 0 being the default stream; 0 on the host
    PyObject* name  # the argument that the device is of, a literal, for messages


# Of a call whose first array is `first`, given as `example`. On the host a stream is refused.
cdef int find_place(Place* place, Tensor first, str name, object example, object stream) except -1

# That an array is where the call runs.
cdef int check_place(Tensor tensor, str name, const Place* place) except -1

# A new C-contiguous tensor with undefined elements, for the work of the call: scratch memory.
cdef Tensor new_at(int ndim, const int64_t* shape, int dtype_code, const Place* place)

# The same for a result, which `finished` turns into an array of the framework of `example` once the work is launched.
cdef Tensor new_result(int ndim, const int64_t* shape, int dtype_code, object example, const Place* place)
cdef object finished(Tensor result, object example, const Place* place)

# On CUDA: what the call's stream must wait for before it reads what the caller gave, and who waits for what it wrote.
cdef int await_arrays(tuple arrays, const Place* place) except -1
cdef int note_written(Tensor tensor, const Place* place) except -1

# On the host or CUDA.
cdef Tensor any_tensor(object array, str name)

# float32, float16 or bfloat16 of `ndim` axes, aligned, last axis contiguous, no axis from `first_full` on empty; on the
# host or CUDA, here and below.
cdef Tensor float_tensor(object array, str name, int ndim, int first_full, str axes)
cdef Tensor cache_tensor(object array, str name)

# The same of any rank and layout.
cpdef Tensor float_array(object array, str name)

# int32 or int64 of `ndim` axes where the call runs; of two axes the last is contiguous. What is on the host goes to a
# device, never back. No place: the host, without a call.
cdef Tensor index_tensor(object array, str name, int ndim, str axes, const Place* place)

# The same where it is given: on the host, or on the device of the call.
cdef Tensor given_indices(object array, str name, int ndim, str axes, const Place* place)

# A C-contiguous copy of a host tensor where the call runs, or the tensor itself where it is there.
cdef Tensor brought_to(Tensor tensor, str name, const Place* place)

# One number for each head, where the call runs: on the host of any of the three float dtypes and any stride, on CUDA
# contiguous float32.
cdef Tensor head_numbers(object array, str name, int64_t num_heads, const Place* place)

# The same from a single number too; None where it changes nothing. Numbers that come on CUDA are taken as they are.
cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place)

# What numbers are divided by: one for all in `divisor`, which is 1 where there are others or none.
cdef Tensor divisors(object scale, str name, int64_t num_kv_heads, const Place* place, float* divisor)

cdef Tensor flat_mask(object array, const Place* place)
cdef double finite_number(object number, str name) except? -1
cdef bint read_flag(object value, str name) except -1
cdef int read_window(object window, int64_t* left, int64_t* right) except -1
cdef int check_caches(Tensor key_cache, Tensor value_cache) except -1
cdef int check_aligned(Tensor tensor, str name) except -1
cdef int check_rank(Tensor tensor, str name, int ndim, str axes) except -1
cdef int check_last_axis(Tensor tensor, str name) except -1
cdef int check_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1
cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1
cdef int check_writable(Tensor tensor, str name) except -1
