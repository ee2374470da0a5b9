"""Attention over a paged cache: the plan of a batch, the call, and merges of partial results."""
