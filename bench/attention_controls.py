"""The controls of attention on the host, for scripts that time other libraries beside pagecore."""

from bench.host.attention_controls import Reader

__all__ = ["Reader"]
