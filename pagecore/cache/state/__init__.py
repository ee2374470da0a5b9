"""The native state of a cache: its lock, its sequences, and the tenants of its blocks."""
