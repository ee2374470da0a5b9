"""Bindings of the kernels that write and read rows of latent caches."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport (
    Indices,
    Table,
    TokenArray,
    fill_block_array,
    index_array,
    table_array,
)
from pagecore.ops.arguments._arguments cimport Place, note_written
from pagecore.ops.cuda.launch cimport PC_MOVE_SHARED_BYTES, Grid, kThreads

from pagecore.ops.cuda.compilation import kernels

cdef extern from "pagecore/ops/cuda/latent/latent_row_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef struct PcLatentWriteParams:
        pass

    cdef struct PcLatentGatherParams:
        pass

    cdef cppclass LatentWriteLaunch:
        PcLatentWriteParams params
        Grid grid

    cdef cppclass LatentGatherLaunch:
        PcLatentGatherParams params
        Grid grid

    LatentWriteLaunch latent_write_launch(
        const TokenArray& latent, const TokenArray& rope, const LatentPlaneArgs& planes, const Indices& slots,
        float factor) except +raise_python_error
    LatentGatherLaunch latent_gather_launch(
        const LatentPlaneArgs& planes, const Table& table, const Indices& seq_lens, const Indices& rows,
        const TokenArray& out, int64_t longest, int64_t lowest, float factor) except +raise_python_error

# By DType.
cdef tuple GATHERS = tuple(f"gather_latent_rows<{name}>" for name in ("float", "pc_half", "pc_bfloat16"))


cdef void fill_planes(LatentPlaneArgs* planes, Tensor latent, Tensor rope, const LatentPlaneSizes* sizes) noexcept:
    fill_block_array(&planes.latent, latent)
    planes.has_rope = rope is not None
    if rope is not None:
        fill_block_array(&planes.rope, rope)
    planes.format, planes.latent_dim, planes.rope_dim = sizes.format, sizes.latent_dim, sizes.rope_dim


cdef int write_rows(
        const TokenArray& new_latent, const TokenArray& new_rope, Tensor latent, Tensor rope,
        const LatentPlaneSizes* sizes, Tensor slots, float factor, const Place* place) except -1:
    cdef LatentPlaneArgs planes
    fill_planes(&planes, latent, rope, sizes)
    cdef LatentWriteLaunch launch = latent_write_launch(
        new_latent, new_rope, planes, index_array(slots), factor)
    if launch.grid.x == 0:
        return 0
    kernels.launch(
        "write_latent_rows", (launch.grid.x, 1, 1), kThreads, 0, place.stream, <uintptr_t>&launch.params,
        place.device_id)
    note_written(latent, place)
    return 0 if rope is None else note_written(rope, place)


cdef int gather_rows(
        Tensor latent, Tensor rope, const LatentPlaneSizes* sizes, Tensor table, Tensor seq_lens, Tensor rows,
        const TokenArray& out, int64_t longest, int64_t lowest, float factor, const Place* place) except -1:
    cdef LatentPlaneArgs planes
    fill_planes(&planes, latent, rope, sizes)
    cdef LatentGatherLaunch launch = latent_gather_launch(
        planes, table_array(table), index_array(seq_lens), index_array(rows), out, longest, lowest, factor)
    if launch.grid.x == 0 or launch.grid.y == 0:
        return 0
    kernels.launch(
        GATHERS[<int>out.type], (launch.grid.x, launch.grid.y, 1), kThreads, PC_MOVE_SHARED_BYTES, place.stream,
        <uintptr_t>&launch.params, place.device_id)
    return 0
