from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.affine_codes cimport AffineCodes
from pagecore.ops.args cimport Cache, Indices
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.latent._latent cimport LatentPlaneArgs, LatentPlaneSizes
from pagecore.ops.cuda.launch cimport Grid
from pagecore.ops.hadamard_rows cimport HadamardRows
from pagecore.ops.sealed_plane cimport SealArgs
from pagecore.ops.state_plane cimport StatePlane


# convert.pxi

# Conversions of stored rows between formats on CUDA. The caller has checked all arguments except the contents of arrays
# on the device; kernels skip invalid pairs there.

cdef extern from "pagecore/ops/cuda/moves/write_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass Divisors:
        const char* data
        float for_all
        int32_t stride

cdef extern from "pagecore/ops/cuda/pair_runs.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass BlockPairs:
        int32_t lowest

    BlockPairs host_pairs(const Indices& sources, const Indices& targets, bint one_cache) except +raise_python_error
    BlockPairs device_pairs(const Indices& sources, const Indices& targets, bint independent)

cdef extern from "pagecore/ops/cuda/codecs/convert_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass PcConvertParams:
        pass

    cdef cppclass PcLatentConvertParams:
        pass

    cdef cppclass ConvertArgs:
        Cache source
        Cache target
        Divisors source_factors
        Divisors target_factors
        cbool is_4over6

    cdef cppclass LatentConvertArgs:
        LatentPlaneArgs source
        LatentPlaneArgs target
        float source_factor
        float target_factor

    cdef cppclass ConvertBlocks:
        BlockPairs pairs
        int64_t identity
        int64_t num_source_blocks
        int64_t num_target_blocks

    cdef cppclass ConvertLaunch:
        PcConvertParams params
        Grid grid

    cdef cppclass LatentConvertLaunch:
        PcLatentConvertParams params
        Grid grid

    void add_launches(
        vector[ConvertLaunch]& launches, const ConvertArgs& args,
        const ConvertBlocks& blocks) except +raise_python_error
    void add_launches(
        vector[LatentConvertLaunch]& launches, const LatentConvertArgs& args,
        const ConvertBlocks& blocks) except +raise_python_error


# Given factors of a cache: one for each head on the device, with a stride in elements, or `for_all`.
cdef struct Factors:
    char* data
    float for_all
    int32_t stride


cdef class DeviceConversions:
    """The conversions of a call."""

    cdef vector[ConvertArgs] caches
    cdef vector[LatentConvertArgs] latents
    cdef vector[ConvertLaunch] code_launches
    cdef vector[LatentConvertLaunch] latent_launches
    cdef object code_kernel, latent_kernel

    cdef bint is_empty(self) noexcept
    cdef int add(
        self, const Cache& source, Factors source_factors, const Cache& target, Factors target_factors,
        bint is_4over6) except -1
    # Latents of one plane, which holds both parts of a row. `factor` is that of e4m3 codes.
    cdef int add_latents(
        self, Tensor source, const LatentPlaneSizes* source_sizes, float source_factor, Tensor target,
        const LatentPlaneSizes* target_sizes, float target_factor) except -1
    # Makes the launches of a call and loads its kernels, which may fail; launch() fails only if the device does. Pairs
    # on the host have been checked, and the launches carry them.
    cdef int prepare(
        self, Tensor pairs, bint independent, int64_t lowest, int64_t num_source_blocks, int64_t num_target_blocks,
        const Place* place) except -1
    # The same for block i to block i of every cache.
    cdef int prepare_all(self, int64_t num_blocks, const Place* place) except -1
    cdef int make_launches(self, const ConvertBlocks& blocks, const Place* place) except -1
    cdef int launch(self, const Place* place) except -1


# affine.pxi

cdef extern from "pagecore/ops/cuda/codecs/affine_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass AffineBlocks:
        int64_t count
        int64_t numbers_stride
        int64_t words_stride
        int64_t scales_stride

# Seals pairs of blocks, or with `restores` fills plain ones: the columns of `pairs`, on the host or the device. The
# caller has checked all arguments except the contents of arrays on the device; the kernel skips invalid pairs there.
cdef int convert_sealed_blocks(const SealArgs& args, Tensor pairs, bint restores, const Place* place) except -1

# Fills the codes and scales of groups, or with `restores` the numbers.
cdef int convert_affine(
    const AffineCodes& codes, const AffineBlocks& blocks, bint restores, const Place* place) except -1


# states.pxi

# Conversions of recurrent states on CUDA. The caller has checked planes and pairs: see state_launch.hpp.

cdef int convert_states(
    const vector[StatePlane]& planes, const int64_t* pairs, int64_t count, bint restores, const Place* place) except -1


# hadamard.pxi

# Transforms rows of checked arrays; there is at least one.
cdef int hadamard(const HadamardRows& rows, const Place* place) except -1
