"""Launches of latent attention, of its indexer, and of writes of latents."""
