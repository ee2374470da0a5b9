"""Latent attention, its indexer, and writes of latents."""
