"""Tiers: a cache together with the memories in which its prefixes continue."""
