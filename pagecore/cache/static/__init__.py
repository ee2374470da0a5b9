"""The static cache, which has no blocks."""
