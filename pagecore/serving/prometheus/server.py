"""A server that answers the scrapes of Prometheus."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Self

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.serving.prometheus.client import import_client
from pagecore.storage.checks import require_int, shown

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer", "PortError"]

USE_OWN_ADDRESS = "use an address of this machine, such as '127.0.0.1' or '0.0.0.0'"


class PortError(PagecoreError, OSError):
    """A port or address cannot be opened; nothing was started."""


class MetricsServer:
    """Serves a registry at ``http://ADDRESS:PORT/metrics`` from threads of its own, until it is closed.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry
    port : int
        0 to 65535; 0 takes a free port.
    address : str
        Address to listen on. The default accepts scrapes from this machine only; "0.0.0.0" accepts them from all
        networks. Metrics are served without authentication.

    Attributes
    ----------
    port : int
    url : str

    Raises
    ------
    PortError
        The port is in use, or may not be opened; or `address` is not one of this machine.
    ShapeError
        `port` is not an integer in its range.
    UnsupportedOption
        prometheus-client is not installed, `registry` is not a registry, or `address` is not a string.
    """

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> None:
        number = require_int("port", port, 0, max=65535)
        if not isinstance(address, str):
            raise UnsupportedOption(f"address is {shown(address)}; expected a string such as '127.0.0.1'")
        client = import_client("MetricsServer")
        if not isinstance(registry, client.CollectorRegistry):
            raise UnsupportedOption(f"registry is {shown(registry)}; expected a prometheus_client.CollectorRegistry")
        try:
            self._server, self._thread = client.start_http_server(number, address, registry)
        except (socket.gaierror, ValueError) as error:  # ValueError: text that no host name can have
            raise PortError(f"address {shown(address)} is not a host: {error}; {USE_OWN_ADDRESS}") from error
        except OSError as error:
            is_foreign = error.errno == errno.EADDRNOTAVAIL
            remedy = USE_OWN_ADDRESS if is_foreign else "use another port, or end the process that has it"
            raise PortError(
                f"port {number} of {address} cannot be opened: {error.strerror or error}; {remedy}"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.port}/metrics"
        self._is_open = True

    def close(self) -> None:
        """End the server, and wait for its thread; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
