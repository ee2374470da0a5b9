"""DiskStore: blocks in files, by content key."""

from pagecore.tiers.disk.store import DiskStore

__all__ = ["DiskStore"]
