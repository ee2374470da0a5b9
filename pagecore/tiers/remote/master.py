"""Mooncake's master: the check that one answers at an address, and its directory of entries, by HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import quote

from pagecore.errors import StoreError, UnsupportedOption
from pagecore.storage.checks import shown

PROBE_SECONDS = 5.0
# coro_rpc, the protocol of the master: first byte of every message, and the header of a call of function 0.
RPC_MAGIC = b"\x15"
RPC_CALL = struct.pack("<4B4I", RPC_MAGIC[0], 0, 0, 0, 1, 0, 0, 0)
# Port of the master's HTTP server without --metrics_port.
ADMIN_PORT = 9003
# Most bytes of an answer for each entry; an entry has the addresses of its copies.
ANSWER_BYTES = 16 << 10
ABSENT = "OBJECT_NOT_FOUND"


def split_address(name: str, address: object, program: str) -> tuple[str, int]:
    """Return host and port of an address; raise UnsupportedOption if it is not "host:port", or lists several."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or set(host) & set("/,;") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UnsupportedOption(f"{name} is {shown(address)}; give 'host:port' of {program}")
    return host.strip("[]"), int(port)


def check_master(master: object) -> tuple[str, int]:
    """Return host and port of a master that answers: Mooncake's client waits forever for any other server.

    Raises
    ------
    UnsupportedOption
        An address that does not parse.
    StoreError
        No master answers there.
    """
    host, port = split_address("master", master, "mooncake_master")
    try:
        with socket.create_connection((host, port), PROBE_SECONDS) as peer:
            answer = _answer(peer)
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"no Mooncake master answers at {master}: {reason}; start mooncake_master --rpc_port={port}"
        ) from None
    if answer[:1] != RPC_MAGIC:
        raise StoreError(
            f"expected the answer of a Mooncake master at {master}, got {answer[:20]!r}; check the address"
        )
    return host, port


def hangs(host: str, port: int, seconds: float) -> bool:
    """Return True if a master accepts connections and does not answer; False if it answers, or is gone."""
    try:
        with socket.create_connection((host, port), seconds) as peer:
            peer.sendall(RPC_CALL)
            peer.recv(1)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


class Directory:
    """The entries of a cluster, by the HTTP server of its master, which asks without leases.

    A query of Mooncake's client renews the lease of what it finds: entries that are asked for now and then would never
    be evicted, and could not be removed. One thread uses a directory; another may call `abort`.

    Parameters
    ----------
    host : str
    port : int
        The master's ``--metrics_port``.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = f"{host}:{port}"
        self._connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)

    def check(self) -> None:
        """Raise StoreError unless a master answers, which says of an entry that it is absent."""
        name = "pagecore:absent"
        try:
            if self.absent([name]) != {name}:
                raise ValueError("it does not say that an entry is absent")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StoreError(
                f"no directory of a Mooncake master answers at {self._address}: {str(error) or type(error).__name__}; "
                "give admin='host:port' with the --metrics_port of mooncake_master, or leave list_seconds out"
            ) from None
        finally:
            self.close()

    def absent(self, names: list[str]) -> set[str]:
        """Return the names of entries that the cluster does not have.

        Raises
        ------
        OSError, ValueError, HTTPException
            No complete answer; the next call connects again.
        """
        try:
            self._connection.request("GET", f"/batch_query_keys?keys={','.join(map(quote, names))}")
            answer = self._connection.getresponse()
            content = answer.read(ANSWER_BYTES * (len(names) + 1))
            if not answer.isclosed():
                raise ValueError(f"an answer of more than {len(content)} bytes")
            if answer.status != http.client.OK:
                raise ValueError(f"status {answer.status} {answer.reason}")
            return _absent(json.loads(content), names)
        except BaseException:
            self.close()
            raise

    def abort(self) -> None:
        """Let a running call of another thread raise soon."""
        peer = self._connection.sock
        if peer is not None:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _absent(answer: object, names: Iterable[str]) -> set[str]:
    found = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(found, dict) or any(not isinstance(found.get(name), dict) for name in names):
        raise ValueError("an answer without the entries that were asked for")
    return {name for name in names if found[name].get("error") == ABSENT}


def _answer(peer: socket.socket) -> bytes:
    """Return the beginning of the answer to a call that no master has; empty if there is none."""
    try:
        peer.sendall(RPC_CALL)
        return peer.recv(64)
    except (TimeoutError, ConnectionError):
        return b""
