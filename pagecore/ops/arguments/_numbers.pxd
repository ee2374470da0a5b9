# Options and per-head numbers as C values and Tensors; see _numbers.pyx. `name` is that of the argument, for messages.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place


# One number for each head, on the device of the call: any float dtype and stride on the host, contiguous float32 on
# CUDA.
cdef Tensor head_numbers(object array, str name, int64_t num_heads, const Place* place)

# head_numbers() that also takes a single number, or an array of one; the result for an array of one on a device is a
# view with a stride of 0. Returns None if all scales are the number 1. Numbers on the host must be finite and, with
# `divides`, not 0; numbers on a device are not checked.
cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place)

# The stride of scales in elements: 1, or 0 for one number that all heads share.
cdef int scale_stride(Tensor scales) noexcept

# Scales to divide by: a single number is written to `divisor`, and None is returned. Otherwise `divisor` is 1.
cdef Tensor divisors(object scale, str name, int64_t num_kv_heads, const Place* place, float* divisor)

cdef double finite_number(object number, str name) except? -1
# A cap of scores: 0 for none, or a number by which a score can be divided.
cdef double read_softcap(object softcap) except? -1
cdef bint read_flag(object value, str name) except -1
# An integer from `least` to the largest int32.
cdef int64_t read_size(object value, str name, int64_t least) except -1
# The index of one of the names in `options`.
cdef int read_choice(object value, str name, tuple options) except -1
