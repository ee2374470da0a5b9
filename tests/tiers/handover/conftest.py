"""Pairs of transports: that of the exporter, which listens, and that of the importer."""

import importlib
import threading
from contextlib import contextmanager

import pytest

from pagecore.tiers.handover.transports.nixl import MODULES, NixlTransport
from pagecore.tiers.handover.transports.sockets import SocketTransport
from tests.capabilities import missing


def require_transport(kind):
    """Skip the test unless the library of a transport is installed with the system libraries that it needs."""
    reasons = []
    for name in MODULES if kind == "nixl" else ("mooncake.engine",):
        try:
            importlib.import_module(name)
            return
        except ImportError as error:
            reasons.append(str(error))
    missing(kind, "; ".join(reasons))


@contextmanager
def pair_of(kind, folder):
    if kind in ("nixl", "mooncake"):
        require_transport(kind)
        from pagecore.tiers.handover.transports.mooncake import MooncakeTransport

        made = NixlTransport if kind == "nixl" else MooncakeTransport
        address, options = "tcp://127.0.0.1:0", {"staging_bytes": 1 << 16}
    else:
        made, options = SocketTransport, {}
        address = "tcp://127.0.0.1:0" if kind == "tcp" else f"unix://{folder}/handover.sock"
    with made(address, **options) as exporter, made(**options) as importer:
        yield exporter, importer


@pytest.fixture
def sockets(tmp_path):
    """A pair over a Unix socket; every thread ends."""
    before = set(threading.enumerate())
    with pair_of("unix", tmp_path) as pair:
        yield pair
    assert {each for each in threading.enumerate() if each.name.startswith("pagecore")} <= before


@pytest.fixture(scope="session", params=["tcp", "unix", "nixl", "mooncake"])
def pair(request, tmp_path_factory):
    """A pair of each kind; the libraries take a second to open or to close one."""
    with pair_of(request.param, tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture
def tcp(tmp_path):
    with pair_of("tcp", tmp_path) as pair:
        yield pair
