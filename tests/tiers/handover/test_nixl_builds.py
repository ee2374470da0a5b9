"""Builds of NIXL, of which the library itself may name one that is not installed."""

import sys

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.tiers.handover.nixl import MODULES, NixlTransport, _library
from tests.tiers.handover.conftest import require_transport


def without(monkeypatch, names):
    for name in names:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, name, None)


def test_the_installed_build_is_used_if_nixl_names_another(monkeypatch):
    require_transport("nixl")
    without(monkeypatch, MODULES[:1])
    with NixlTransport("tcp://127.0.0.1:0", staging_bytes=1 << 16) as transport:
        assert transport.address


def test_no_build_is_refused_with_the_extra_to_install(monkeypatch):
    without(monkeypatch, MODULES)
    with pytest.raises(UnsupportedOption, match=r"pagecore\[nixl\]"):
        NixlTransport(staging_bytes=1 << 16)


def test_the_thread_of_an_exporter_waits_for_messages(monkeypatch):
    """With a pause of 0, the default of NIXL's Python class, it polls without a wait."""
    require_transport("nixl")
    library = _library()
    bindings = sys.modules[library.nixl_agent.__module__].nixlBind
    made = bindings.nixlAgent
    seen = []

    def native(name, config):
        seen.append((config.useProgThread, config.pthrDelay > 0))
        return made(name, config)

    monkeypatch.setattr(bindings, "nixlAgent", native)
    with NixlTransport("tcp://127.0.0.1:0", staging_bytes=1 << 16):
        assert seen[-1] == (True, True)
    with NixlTransport(staging_bytes=1 << 16):
        assert seen[-1] == (False, False)
    assert all(pauses or not has_thread for has_thread, pauses in seen)
