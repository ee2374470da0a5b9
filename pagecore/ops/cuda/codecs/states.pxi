"""Bindings of the kernels that convert recurrent states."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport FLOAT32, DType
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.launch cimport Grid
from pagecore.ops.state_plane cimport StatePlane

from pagecore.arrays import cuda
from pagecore.ops.cuda.compilation import kernels

cdef extern from "cuda_src/abi/states.h" nogil:
    cdef struct PcStateParams:
        pass

    cdef enum:
        PC_STATE_THREADS
        PC_STATE_SHARED_BYTES

cdef extern from "pagecore/ops/cuda/codecs/state_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass StateLaunch:
        PcStateParams params
        DType type
        Grid grid

    vector[StateLaunch] state_launches(
        const vector[StatePlane]& planes, const int64_t* pairs, int64_t count) except +raise_python_error


cdef int convert_states(
        const vector[StatePlane]& planes, const int64_t* pairs, int64_t count, bint restores,
        const Place* place) except -1:
    cdef vector[StateLaunch] launches = state_launches(planes, pairs, count)
    cdef str entry = "dequantize_states" if restores else "quantize_states"
    cdef int shared_bytes = 0 if restores else PC_STATE_SHARED_BYTES
    cdef list ready = []
    cdef size_t i
    for i in range(launches.size()):
        name = f"{entry}<{'float' if <int>launches[i].type == FLOAT32 else 'pc_bfloat16'}>"
        ready.append(kernels.kernel(name, place.device_id, place.stream))
    runtime = cuda.runtime()
    for i in range(launches.size()):
        grid = (launches[i].grid.x, launches[i].grid.y, launches[i].grid.z)
        runtime.launch(
            ready[i], grid, PC_STATE_THREADS, shared_bytes, place.stream, <uintptr_t>&launches[i].params)
    return 0
