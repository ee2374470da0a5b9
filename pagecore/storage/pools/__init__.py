"""Pools of blocks and states, and their layouts."""
