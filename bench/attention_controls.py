"""The controls of attention on the host, for scripts that time other libraries next to pagecore."""

from bench.host.attention_controls import Reader

__all__ = ["Reader"]
