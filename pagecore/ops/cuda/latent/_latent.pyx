"""Launches of latent attention, of its indexer, and of writes of latents."""

include "index.pxi"
include "latent.pxi"
include "latent_rows.pxi"
