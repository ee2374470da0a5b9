"""Latent attention (MLA): writes, reads and attention of latents, and the indexer of sparse ones."""

include "latent_cache.pxi"
include "indexer.pxi"
include "latent.pxi"
include "latent_rows.pxi"
include "topk.pxi"
