"""Attention of pagecore in the continuous batching of transformers."""
