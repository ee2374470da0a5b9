"""Writes, copies and moves of blocks and slots."""
