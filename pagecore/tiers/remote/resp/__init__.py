"""Store over Redis and Valkey."""

from pagecore.tiers.remote.resp.store import RespStore

__all__ = ["RespStore"]
