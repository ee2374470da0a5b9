"""Builds of NIXL, of which the library itself may name one that is not installed."""

import sys
from types import SimpleNamespace

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.tiers.handover.transports.nixl import MODULES, NixlTransport, _agent, _library
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


class Config:
    """A configuration of a native agent, by the names of another version than those that the transport sets."""

    __slots__ = ("useProgThread",)


class Agent:
    """The public class of a version of nixl; the module has no bindings unless a test gives it some."""

    def __init__(self, name, config):
        self.name, self.config, self.backends = name, config, list(config["backends"])
        self.agent = "its own"

    def create_backend(self, name, _options):
        self.backends.append(name)


class Renamed(Agent):
    """A version whose native agent has another name."""

    def __init__(self, name, config):
        super().__init__(name, config)
        del self.agent


BINDINGS = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=lambda name, config: (name, config.pthrDelay))


@pytest.mark.parametrize(
    ("bindings", "agent"),
    [
        (None, Agent),
        (SimpleNamespace(), Agent),
        (SimpleNamespace(nixlAgentConfig=Config, nixlAgent=BINDINGS.nixlAgent), Agent),
        (SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=lambda config: config), Agent),
        (BINDINGS, Renamed),
    ],
    ids=["no bindings", "no config", "no pause", "other arguments", "no native agent"],
)
def test_the_public_class_is_used_if_a_version_of_nixl_has_other_bindings(monkeypatch, bindings, agent):
    if bindings is not None:
        monkeypatch.setattr(sys.modules[__name__], "nixlBind", bindings, raising=False)
    made = _agent(SimpleNamespace(nixl_agent=agent, nixl_agent_config=dict), has_thread=True)
    assert (made.config["enable_prog_thread"], made.backends) == (True, ["UCX"])
    assert getattr(made, "agent", "its own") == "its own"


def test_the_bindings_are_used_if_they_are_there(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "nixlBind", BINDINGS, raising=False)
    made = _agent(SimpleNamespace(nixl_agent=Agent, nixl_agent_config=dict), has_thread=True)
    assert (made.config["enable_prog_thread"], made.backends) == (False, ["UCX"])
    assert made.agent[0] == made.name
    assert made.agent[1] > 0
