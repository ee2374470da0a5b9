"""Fixtures of the tests of requests."""

from tests.tiers.manager.request_world import world

__all__ = ["world"]
