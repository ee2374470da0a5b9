"""Transport over Mooncake's transfer engine: reads through TCP, or RDMA where there is a device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.tiers.handover.errors import HandoverError, PeerLost
from pagecore.tiers.handover.pieces import Pieces
from pagecore.tiers.handover.transports.onesided import STAGING_BYTES, OneSidedTransport


@dataclass(eq=False)
class _Batch:
    """Reads that a thread submits one by one: the engine reports the state of a batch's first read only.

    Attributes
    ----------
    pending : list of int
        Reads that were submitted and have not ended.
    error : PeerLost, optional
        Reason why not all reads were submitted.
    kept : list
        Memory that the reads may write after the transport was closed.
    is_abandoned : bool
        True once nothing waits for the reads, so that the thread submits no further one.
    """

    pending: list[int] = field(default_factory=list)
    error: PeerLost | None = None
    is_abandoned: bool = False
    kept: list[object] = field(default_factory=list)
    thread: threading.Thread | None = None


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

    Notes
    -----
    A submission waits for an exporter that was not met before: up to 60 s if it hangs, and with it all others of the
    engine (version 0.3.13). Threads therefore submit the reads; an import leaves its thread at the deadline. If the
    transport is closed meanwhile, the engine and the memory that it may write stay until the thread has ended.
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
        self._submitting: set[_Batch] = set()
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
        """Destroy the engine, which ends its reads; a thread that submits reads does it when it ends."""
        memory = [each.memory for each in self._staging], list(self._registered.values())
        for batch in list(self._submitting):
            batch.kept.append(memory)
            batch.is_abandoned = True
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
        sizes = remote[:, 1].astype(np.int64)
        places = (local + np.cumsum(sizes) - sizes).tolist()
        reads = [(place, *piece) for place, piece in zip(places, remote.tolist(), strict=True)]
        batch = _Batch()
        self._submitting.add(batch)
        batch.thread = threading.Thread(
            target=_submit,
            args=([self._engine], peer.decode(), reads, batch, self._submitting),
            name="pagecore-mooncake",
            daemon=True,
        )
        try:
            batch.thread.start()
        except RuntimeError as error:
            self._submitting.discard(batch)
            raise HandoverError(f"no thread can be started for the reads of Mooncake: {error}; import again") from None
        return batch

    def is_done(self, handle: Any) -> bool:
        """Return True if all reads are complete."""
        if handle.thread is not None:
            if handle.thread.is_alive():
                return False
            handle.thread = None
        if handle.error is not None:
            raise handle.error
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

    def abandon(self, handle: Any) -> None:
        """Let the thread of a batch end after the read that it is submitting."""
        handle.is_abandoned = True


def _submit(
    engine: list[Any], peer: str, reads: list[tuple[int, int, int]], batch: _Batch, submitting: set[_Batch]
) -> None:
    """Submit reads, (local address, address, bytes) each; runs in a thread of its own.

    `engine` has the engine: the thread may be the last that holds it, and destroys it before it releases the memory.
    """
    try:
        for place, address, nbytes in reads:
            if batch.is_abandoned:
                break
            ticket = engine[0].batch_transfer_async_read(peer, [place], [address], [nbytes])
            if not ticket:
                raise PeerLost("the exporter ended, or its engine is not reachable")
            batch.pending.append(ticket)
    except Exception as error:
        batch.error = PeerLost(f"Mooncake cannot read from {peer}: {error}")
    engine.clear()
    submitting.discard(batch)
    batch.kept.clear()
