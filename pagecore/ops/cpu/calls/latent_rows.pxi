"""Rows of latent caches on the host: Tensors become arguments of the kernels."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport index_array, table_array
from pagecore.ops.cpu._cpu cimport gather_latent as run_gather_latent
from pagecore.ops.cpu.args cimport PackedSequences
from pagecore.ops.cpu.latent.latent cimport LatentCache, LatentRows


cdef int gather_latent(
        const LatentCache& cache, double factor, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor out, int64_t lowest) except -1:
    cdef PackedSequences batch
    cdef LatentRows packed
    batch.table = table_array(block_table)
    batch.seq_lens = index_array(seq_lens)
    batch.rows = index_array(rows)
    batch.block_size, batch.num_blocks = cache.block_size, cache.num_blocks
    batch.num_tokens, batch.lowest = out.shape_[0], lowest
    packed.data, packed.stride, packed.type = out.data, out.strides_[0], <DType>out.dtype_code
    return run_gather_latent(cache, <float>factor, batch, packed)
