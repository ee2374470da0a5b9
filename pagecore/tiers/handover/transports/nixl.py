"""Transport over NIXL: reads by UCX, through shared memory on one host and RDMA or TCP between hosts."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.tiers.handover.errors import PeerLost
from pagecore.tiers.handover.pieces import Pieces
from pagecore.tiers.handover.transports.onesided import OneSidedTransport

INFINIBAND = Path("/sys/class/infiniband")
# nixl chooses its build by the CUDA version of the libraries that the process has imported, and fails without that
# build. Reads of host memory work with any build.
MODULES = "nixl._api", "nixl_cu13._api", "nixl_cu12._api"
# Longest pause of an exporter's progress thread, in microseconds. UCX wakes the thread when a message arrives; with
# NIXL's own 0 it polls all the time, on a core of its own, and slows the copies down.
PROGRESS_PAUSE_US = 1000
# Descriptions of exporters that are remembered; one that was forgotten is loaded again.
MAX_PEERS = 256


class NixlTransport(OneSidedTransport):
    """Hand sequences over through a NIXL agent with the UCX backend; parameters are those of `OneSidedTransport`.

    Raises
    ------
    UnsupportedOption
        nixl is not installed.
    DeviceError
        The agent cannot be made.

    Notes
    -----
    The library is NVIDIA's NIXL; it needs no GPU. The import of nixl takes seconds: make the transport at the start.
    UCX reads its environment variables; without InfiniBand on the host the transport sets UCX_MODULES to "^ib" by
    default.
    """

    name = "nixl"

    def open_engine(self) -> None:
        """Make the agent."""
        if not INFINIBAND.is_dir():
            # UCX's module for InfiniBand does nothing here, and the libnl-route that it loads crashes at exit.
            os.environ.setdefault("UCX_MODULES", "^ib")
        library = _library()
        self._calls = threading.Lock()  # an agent serves one thread at a time
        self._peers: dict[bytes, str] = {}
        self._sections: dict[int, Any] = {}
        try:
            self._agent: Any = _agent(library, has_thread=self.is_serving)
        except Exception as error:
            raise DeviceError(
                f"NIXL cannot make an agent with UCX: {error}; check UCX_TLS and UCX_NET_DEVICES"
            ) from None

    def close_engine(self) -> None:
        """Destroy the agent, which ends its reads."""
        with self._calls:
            for section in self._sections.values():
                _quietly(self._agent.deregister_memory, section)
            self._sections.clear()
            self._agent = None

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the agent."""
        with self._calls:
            try:
                self._sections[address] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
            except Exception as error:
                raise DeviceError(
                    f"NIXL cannot register {nbytes} bytes: {error}; check the limit of locked memory"
                ) from None

    def unregister(self, address: int) -> None:
        """Make the agent forget memory."""
        with self._calls:
            section = self._sections.pop(address, None)
            if section is not None and self._agent is not None:
                _quietly(self._agent.deregister_memory, section)

    def own_peer(self) -> bytes:
        """Return the agent's metadata, which lists the registered memory."""
        with self._calls:
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def begin(self, peer: bytes, local: int, remote: Pieces) -> Any:
        """Begin to read remote pieces, one after the other, to a local address."""
        sizes = remote[:, 1].astype(np.int64)
        pairs = np.zeros((2, len(remote), 3), np.uint64)
        pairs[0, :, 0] = (local + np.cumsum(sizes) - sizes).astype(np.uint64)
        pairs[1, :, 0] = remote[:, 0]
        pairs[:, :, 1] = remote[:, 1]
        with self._calls:
            try:
                if peer not in self._peers:
                    if len(self._peers) >= MAX_PEERS:
                        self._peers.clear()
                    name = self._agent.add_remote_agent(peer)
                    self._peers[peer] = name.decode() if isinstance(name, bytes) else name
                descriptors = [self._agent.get_xfer_descs(each, "DRAM") for each in pairs]
                handle = self._agent.initialize_xfer("READ", *descriptors, self._peers[peer])
                if self._agent.transfer(handle) == "ERR":
                    raise PeerLost("NIXL cannot begin a read; the exporter ended, or UCX finds no way to it")
            except PeerLost:
                raise
            except Exception as error:
                raise PeerLost(f"NIXL cannot read from the exporter: {error}; check that it runs") from None
        return handle

    def is_done(self, handle: Any) -> bool:
        """Return True if a read is complete."""
        with self._calls:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                raise PeerLost(f"a read of NIXL failed: {error}; the exporter ended") from None
        if state == "ERR":
            raise PeerLost("a read of NIXL failed; the exporter ended")
        return bool(state == "DONE")

    def forget(self, handle: Any) -> None:
        """Release the handle of a complete read."""
        with self._calls:
            _quietly(self._agent.release_xfer_handle, handle)


def _library() -> Any:
    """Return the module of agents; raise UnsupportedOption if no build is installed."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UnsupportedOption("NixlTransport needs nixl; install it with: pip install 'pagecore[nixl]'")


def _agent(library: Any, has_thread: bool) -> Any:
    """Return an agent with UCX; an importer, which polls its reads, has no progress thread."""
    name = f"pagecore-{uuid.uuid4().hex}"
    if has_thread:
        # The Python class fixes the pause at 0: a native agent with another one takes the place of its own, before UCX
        # starts.
        agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False, backends=[]))
        native = _native_agent(library, name) if hasattr(agent, "agent") else None
        if native is not None:
            agent.agent = native
            agent.create_backend("UCX", {})
            return agent
        del agent
    return library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))


def _native_agent(library: Any, name: str) -> Any:
    """Return a native agent whose progress thread pauses; None if a version of nixl has no such bindings."""
    try:
        bindings = sys.modules[library.nixl_agent.__module__].nixlBind
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_PAUSE_US
        return bindings.nixlAgent(name, config)
    except (AttributeError, TypeError):  # the bindings are not public
        return None


def _quietly(call: Any, argument: Any) -> None:
    """Call a function of the library whose failure changes nothing for the caller."""
    try:
        call(argument)
    except Exception:  # NIXL has an exception class of its own for each status
        return
