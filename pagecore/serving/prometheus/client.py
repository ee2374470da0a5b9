"""The optional package prometheus-client."""

from __future__ import annotations

from types import ModuleType

from pagecore.errors import UnsupportedOption

__all__ = ["import_client"]


def import_client(user: str) -> ModuleType:
    """Return the module prometheus_client for `user`; raise UnsupportedOption if it is not installed."""
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise UnsupportedOption(
            f"{user} needs prometheus-client, which is not installed; run pip install 'pagecore[metrics]'"
        ) from None
    return prometheus_client
