"""Servers of the tests of remote stores."""

from tests.tiers.servers import (
    azurite_server,
    mooncake_master,
    moto_server,
    private_master,
    private_resp,
    resp_server,
)

__all__ = ["azurite_server", "mooncake_master", "moto_server", "private_master", "private_resp", "resp_server"]
