"""Latent attention (MLA): writes, reads and attention of latents, and the indexer of sparse ones."""
