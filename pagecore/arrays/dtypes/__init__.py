"""Dtypes, and the formats of stored keys and values."""
