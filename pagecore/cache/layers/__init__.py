"""Layers in groups, and how the layers of each spec are planned, written and attended."""
