"""Layers in groups: their blocks, states, limits and demand."""
