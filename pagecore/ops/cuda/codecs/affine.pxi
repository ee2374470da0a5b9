"""Bindings of the kernel that seals blocks."""

from libc.stdint cimport int32_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.launch cimport Grid
from pagecore.ops.sealed_plane cimport SealArgs

from pagecore.ops.cuda.compilation import kernels

cdef extern from "pagecore/ops/cuda/codecs/affine_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass PcAffineParams:
        pass

    cdef cppclass AffineLaunch:
        PcAffineParams params
        Grid grid

    vector[AffineLaunch] seal_launches(const SealArgs& args, const BlockPairs& pairs) except +raise_python_error


cdef int seal_blocks(const SealArgs& args, Tensor pairs, const Place* place) except -1:
    cdef BlockPairs blocks
    cdef size_t i
    if pairs.device_type == CPU:
        blocks = host_pairs(args.sources, args.targets, False)
    else:
        blocks = device_pairs(args.sources, args.targets, True)
    blocks.lowest = <int32_t>args.lowest
    cdef vector[AffineLaunch] launches = seal_launches(args, blocks)
    if launches.empty():
        return 0
    loaded = kernels.kernel("quantize_affine", place.device_id, place.stream)
    for i in range(launches.size()):
        launch_one(loaded, launches[i].grid, <uintptr_t>&launches[i].params, place)
    return 0
