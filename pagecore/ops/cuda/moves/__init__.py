"""Launches of writes, copies, moves and merges."""
