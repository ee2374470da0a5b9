"""Structures of the layers of families whose code is not in transformers."""
