"""Writes to a paged cache, and moves of its blocks and slots."""
