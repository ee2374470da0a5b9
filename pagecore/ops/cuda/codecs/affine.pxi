"""Bindings of the kernels of codes of 2 or 4 bits: sealed blocks, and whole arrays."""

from libc.stdint cimport int32_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.affine_codes cimport AffineCodes
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

    vector[AffineLaunch] seal_launches(
        const SealArgs& args, const BlockPairs& pairs, bint restores) except +raise_python_error
    vector[AffineLaunch] affine_launches(
        const AffineCodes& codes, const AffineBlocks& blocks, bint restores) except +raise_python_error


cdef int convert_sealed_blocks(const SealArgs& args, Tensor pairs, bint restores, const Place* place) except -1:
    cdef BlockPairs blocks
    if pairs.device_type == CPU:
        blocks = host_pairs(args.sources, args.targets, False)
    else:
        blocks = device_pairs(args.sources, args.targets, True)
    blocks.lowest = <int32_t>args.lowest
    return launch_all(kernel_of(restores), seal_launches(args, blocks, restores), place)


cdef int convert_affine(
        const AffineCodes& codes, const AffineBlocks& blocks, bint restores, const Place* place) except -1:
    return launch_all(kernel_of(restores), affine_launches(codes, blocks, restores), place)


cdef str kernel_of(bint restores):
    return "dequantize_affine" if restores else "quantize_affine"


cdef int launch_all(str name, const vector[AffineLaunch]& launches, const Place* place) except -1:
    cdef size_t i
    if launches.empty():
        return 0
    loaded = kernels.kernel(name, place.device_id, place.stream)
    for i in range(launches.size()):
        launch_one(loaded, launches[i].grid, <uintptr_t>&launches[i].params, place)
    return 0
