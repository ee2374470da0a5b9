"""Tiers: a cache with everything that lies behind it."""
