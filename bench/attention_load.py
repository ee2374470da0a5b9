"""The loads of attention on the host, for scripts that time other libraries next to pagecore."""

from bench.host.attention_load import Load, Paged, Shape

__all__ = ["Load", "Paged", "Shape"]
