"""Binding of the kernel that transforms rows by Hadamard matrices."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport FLOAT32, LAST_FLOAT
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.hadamard_rows cimport HadamardRows

from pagecore.arrays import cuda
from pagecore.ops.cuda.compilation import kernels

cdef extern from "cuda_src/abi/hadamard.h" nogil:
    cdef struct PcHadamardParams:
        pass

    cdef enum:
        PC_HADAMARD_THREADS

cdef extern from "pagecore/ops/cuda/codecs/hadamard_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass HadamardLaunch:
        PcHadamardParams params
        int64_t num_thread_blocks

    HadamardLaunch hadamard_launch(const HadamardRows& rows) except +raise_python_error


cdef int hadamard(const HadamardRows& rows, const Place* place) except -1:
    cdef HadamardLaunch launch = hadamard_launch(rows)
    cdef int dtype_code = <int>rows.type
    name = "float" if dtype_code == FLOAT32 else "pc_bfloat16" if dtype_code == LAST_FLOAT else "pc_half"
    kernel = kernels.kernel(f"hadamard<{name}>", place.device_id, place.stream)
    cuda.runtime().launch(
        kernel, (launch.num_thread_blocks, 1, 1), PC_HADAMARD_THREADS, 0, place.stream, <uintptr_t>&launch.params)
    return 0
