"""Tiers: a cache, its host tier and its stores as one."""
