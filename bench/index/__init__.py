"""Benches of the index: pools, block tables, slots and the prefix tree, with their controls."""
