"""Transport over Mooncake's transfer engine: reads through TCP, or RDMA where there is a device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.tiers.handover.errors import PeerLost
from pagecore.tiers.handover.onesided import STAGING_BYTES, OneSidedTransport
from pagecore.tiers.handover.pieces import Pieces


@dataclass
class _Batch:
    """Reads that were submitted one by one: the engine reports the state of a batch's first read only."""

    pending: list[int] = field(default_factory=list)


class MooncakeTransport(OneSidedTransport):
    """Hand sequences over through Mooncake's transfer engine, without a metadata server.

    Parameters
    ----------
    address, advertised, staging_bytes
        As for `OneSidedTransport`.
    hostname : str
        Name or IP address under which other hosts reach this one's engine.
    protocol : {"tcp", "rdma"}
    devices : str
        RDMA devices, separated by commas; empty for all.

    Raises
    ------
    UnsupportedOption
        Mooncake is not installed.
    DeviceError
        The engine cannot be started.
    """

    name = "mooncake"

    def __init__(
        self,
        address: str | None = None,
        *,
        advertised: str | None = None,
        staging_bytes: int = STAGING_BYTES,
        hostname: str = "127.0.0.1",
        protocol: str = "tcp",
        devices: str = "",
    ) -> None:
        self._options = (hostname, "P2PHANDSHAKE", protocol, devices)
        super().__init__(address, advertised=advertised, staging_bytes=staging_bytes)

    def open_engine(self) -> None:
        """Start the engine."""
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise UnsupportedOption(
                f"MooncakeTransport cannot import mooncake ({error}); install it with: pip install "
                "'pagecore[mooncake]', and libibverbs1, libnuma1 and libcurl4 of the system"
            ) from None
        self._engine: Any = TransferEngine()
        status = self._engine.initialize(*self._options)
        if status != 0:
            raise DeviceError(
                f"Mooncake's engine cannot start as {self._options}: {status}; check hostname and devices"
            )

    def close_engine(self) -> None:
        """Destroy the engine, which ends its reads."""
        self._engine = None

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the engine."""
        status = self._engine.register_memory(address, nbytes)
        if status != 0:
            raise DeviceError(f"Mooncake cannot register {nbytes} bytes: {status}; check the limit of locked memory")

    def unregister(self, address: int) -> None:
        """Make the engine forget memory."""
        if self._engine is not None:
            self._engine.unregister_memory(address)

    def own_peer(self) -> bytes:
        """Return the name of this engine's segment."""
        return f"{self._options[0]}:{self._engine.get_rpc_port()}".encode()

    def begin(self, peer: bytes, local: int, remote: Pieces) -> Any:
        """Begin to read remote pieces, one after the other, to a local address."""
        name, batch = peer.decode(), _Batch()
        sizes = remote[:, 1].astype(np.int64)
        places = (local + np.cumsum(sizes) - sizes).tolist()
        for place, (address, nbytes) in zip(places, remote.tolist(), strict=True):
            ticket = self._engine.batch_transfer_async_read(name, [place], [address], [nbytes])
            if not ticket:
                raise PeerLost(f"Mooncake cannot read from {name}; the exporter ended, or its engine is not reachable")
            batch.pending.append(ticket)
        return batch

    def is_done(self, handle: Any) -> bool:
        """Return True if all reads are complete."""
        pending: list[int] = handle.pending
        while pending:
            status = self._engine.transfer_check_status(pending[-1])
            if status == 0:
                return False
            if status < 0:
                raise PeerLost(f"a read of Mooncake failed ({status}); the exporter ended")
            pending.pop()
        return True

    def forget(self, handle: Any) -> None:
        """Release the handle of a complete read; the engine has done so."""
