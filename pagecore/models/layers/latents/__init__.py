"""Latents of layers: their dims, indexers, and compressed rows."""
