# Rows of latent caches on the host. Arguments are what ops/latent/_latent_rows.pyx has checked; see _cpu.pxd.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.cpu.latent.latent cimport LatentCache


# Optional: rows.
cdef int gather_latent(
    const LatentCache& cache, double factor, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor out,
    int64_t lowest) except -1
