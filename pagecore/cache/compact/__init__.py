"""Compaction: keep some tokens of a sequence, move them together and free the blocks of the others."""
