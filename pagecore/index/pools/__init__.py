"""Pools of block ids, and the containers that they are built of."""
