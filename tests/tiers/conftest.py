"""Servers of the tests of remote stores."""

import pytest

from tests.tiers.servers import (
    azurite_server,
    mooncake_master,
    moto_server,
    private_master,
    private_resp,
    resp_server,
)

__all__ = ["azurite_server", "mooncake_master", "moto_server", "private_master", "private_resp", "resp_server"]

# They take a second to start, and more to notice what is wrong.
SLOW_SERVERS = {"azurite_server", "mooncake_master", "moto_server", "private_master"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW_SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
