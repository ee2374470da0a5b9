"""Bindings of the kernels that convert stored rows between formats."""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache, pair_column
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.latent._latent cimport LatentPlaneSizes, fill_planes
from pagecore.ops.cuda.launch cimport Grid, kThreads

from pagecore.arrays import cuda
from pagecore.ops.cuda.compilation import kernels


cdef class DeviceConversions:
    cdef bint is_empty(self) noexcept:
        return self.caches.empty() and self.latents.empty()

    cdef int add(
            self, const Cache& source, Factors source_factors, const Cache& target, Factors target_factors,
            bint is_4over6) except -1:
        cdef ConvertArgs args
        args.source, args.target, args.is_4over6 = source, target, is_4over6
        args.source_factors.data, args.source_factors.for_all = source_factors.data, source_factors.for_all
        args.target_factors.data, args.target_factors.for_all = target_factors.data, target_factors.for_all
        args.source_factors.stride, args.target_factors.stride = source_factors.stride, target_factors.stride
        self.caches.push_back(args)
        return 0

    cdef int add_latents(
            self, Tensor source, const LatentPlaneSizes* source_sizes, float source_factor, Tensor target,
            const LatentPlaneSizes* target_sizes, float target_factor) except -1:
        cdef LatentConvertArgs args
        fill_planes(&args.source, source, None, source_sizes)
        fill_planes(&args.target, target, None, target_sizes)
        args.source_factor, args.target_factor = source_factor, target_factor
        self.latents.push_back(args)
        return 0

    cdef int prepare(
            self, Tensor pairs, bint independent, int64_t lowest, int64_t num_source_blocks,
            int64_t num_target_blocks, const Place* place) except -1:
        cdef ConvertBlocks blocks
        if pairs.device_type == CPU:
            blocks.pairs = host_pairs(pair_column(pairs, 0), pair_column(pairs, 1), False)
        else:
            blocks.pairs = device_pairs(pair_column(pairs, 0), pair_column(pairs, 1), independent)
        blocks.pairs.lowest = <int32_t>lowest
        blocks.num_source_blocks, blocks.num_target_blocks = num_source_blocks, num_target_blocks
        return self.make_launches(blocks, place)

    cdef int prepare_all(self, int64_t num_blocks, const Place* place) except -1:
        cdef ConvertBlocks blocks
        blocks.identity = blocks.num_source_blocks = blocks.num_target_blocks = num_blocks
        return 0 if num_blocks == 0 else self.make_launches(blocks, place)

    cdef int make_launches(self, const ConvertBlocks& blocks, const Place* place) except -1:
        cdef size_t i
        for i in range(self.caches.size()):
            add_launches(self.code_launches, self.caches[i], blocks)
        for i in range(self.latents.size()):
            add_launches(self.latent_launches, self.latents[i], blocks)
        if not self.code_launches.empty():
            self.code_kernel = kernels.kernel("convert_codes", place.device_id, place.stream)
        if not self.latent_launches.empty():
            self.latent_kernel = kernels.kernel("convert_latents", place.device_id, place.stream)
        return 0

    cdef int launch(self, const Place* place) except -1:
        cdef size_t i
        for i in range(self.code_launches.size()):
            launch_one(
                self.code_kernel, self.code_launches[i].grid, <uintptr_t>&self.code_launches[i].params, place)
        for i in range(self.latent_launches.size()):
            launch_one(
                self.latent_kernel, self.latent_launches[i].grid, <uintptr_t>&self.latent_launches[i].params, place)
        return 0


cdef int launch_one(object kernel, const Grid& grid, uintptr_t params, const Place* place) except -1:
    cuda.runtime().launch(kernel, (grid.x, grid.y, grid.z), kThreads, 0, place.stream, params)
    return 0
