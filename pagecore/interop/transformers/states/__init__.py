"""Layers that keep a state: their specs, their states in the slots of the cache, and calls of their modules."""
