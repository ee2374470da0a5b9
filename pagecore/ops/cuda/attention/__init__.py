"""Launches of paged attention."""
