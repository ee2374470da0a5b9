"""Remote stores for the bench "tiers": Redis over a Unix socket against redis-py, and an object store in a folder."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count as counted
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.runner import Bench, Job, Work
from bench.harness.targets import REDIS_RATIO_MIN
from bench.tiers.store_load import Entries, fingerprint_of, puts_and_gets
from pagecore.errors import StoreError
from pagecore.tiers.remote.objects import ObjectStore
from pagecore.tiers.remote.resp import RespStore
from pagecore.tiers.remote.resp.address import Address
from pagecore.tiers.remote.resp.connection import RespConnection

SET, PIPELINE, RAW = "redis-py, a call each", "redis-py, pipeline", "sendmsg of SET commands"
COPY = "shutil.copyfile"
MIB = 1 << 20
SECONDS_TO_START = 10.0


def run_redis(bench: Bench, entry_bytes: int, count: int) -> None:
    """Time puts and gets of one size in a server that this function starts and ends."""
    if shutil.which("redis-server") is None:
        bench.note("redis-server is not installed: no figures of Redis; make servers installs it")
        return
    with ExitStack() as stack:
        path = stack.enter_context(redis_server(6 * count * entry_bytes + 64 * MIB))
        fingerprint = fingerprint_of(entry_bytes)
        store = stack.enter_context(RespStore(f"unix://{path}", fingerprint=fingerprint, ttl=3600))
        store.name = "redis (Unix socket)"
        written, read = Entries(count, entry_bytes), Entries(count, entry_bytes, seed=1)
        puts, gets = _redis_py(bench, stack, path, written, read)
        puts[RAW] = _raw_puts(stack, path, written)
        target = REDIS_RATIO_MIN if entry_bytes == MIB and SET in gets else None
        puts_and_gets(
            bench,
            store,
            written,
            read,
            put_controls=puts,
            get_controls=gets,
            at_least=None if target is None else {SET: target},
        )


def run_objects(bench: Bench, entry_bytes: int, count: int) -> None:
    """Time puts and gets of one size in a temporary folder, through the page cache."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        whole = folder / "whole"
        whole.write_bytes(np.random.default_rng(5).bytes(count * entry_bytes))
        (folder / "objects").mkdir()
        fingerprint = fingerprint_of(entry_bytes)
        store = stack.enter_context(ObjectStore((folder / "objects").as_uri(), fingerprint=fingerprint))
        store.name = "file:// (obstore)"
        copied = Job(partial(shutil.copyfile, whole, folder / "copy"))
        written, read = Entries(count, entry_bytes), Entries(count, entry_bytes, seed=1)
        puts_and_gets(bench, store, written, read, put_controls={COPY: copied}, get_controls={COPY: copied})


@contextmanager
def redis_server(memory: int, *, port: bool = False) -> Iterator[Path]:
    """Start a Redis server on a Unix socket, or on a free TCP port, and yield the path of the socket or the port.

    The server drops the oldest entries beyond `memory` bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        number = _free_port() if port else 0
        options = ["--port", str(number), "--bind", "127.0.0.1", "--unixsocket", str(path), "--save", ""]
        options += ["--dir", folder, "--maxmemory", str(memory), "--maxmemory-policy", "volatile-ttl"]
        with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as server:
            try:
                limit = time.monotonic() + SECONDS_TO_START
                while not path.exists():
                    if server.poll() is not None or time.monotonic() > limit:
                        raise StoreError("redis-server did not start; run it by hand to see why")
                    time.sleep(0.01)
                yield Path(str(number)) if port else path
            finally:
                server.kill()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _raw_puts(stack: ExitStack, path: Path, written: Entries) -> Work:
    """Return a control that sends the same bytes as SET commands on one connection: the speed of the server's reads."""
    connection = RespConnection(Address.parse(f"unix://{path}"), timeout=10.0)
    connection.open()
    stack.callback(connection.close)
    count, nbytes = written.rows.shape
    rounds = counted()

    def put() -> None:
        buffers: list[bytes | memoryview] = []
        for name, row in zip(_new_names("raw", rounds, count), written.rows, strict=True):
            head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, nbytes)
            buffers += [head, row.data, b"\r\n$2\r\nEX\r\n$3\r\n600\r\n"]
        connection.send(buffers)
        for _ in written.rows:
            assert connection.line() == b"+OK"

    return put


def _new_names(prefix: str, rounds: Iterator[int], count: int) -> list[bytes]:
    """Return keys that no other round has."""
    number = next(rounds)
    return [f"{prefix}:{number}:{index}".encode() for index in range(count)]


def _redis_py(
    bench: Bench, stack: ExitStack, path: Path, written: Entries, read: Entries
) -> tuple[dict[str, Work | Job], dict[str, Work | Job]]:
    """Return the controls of puts and gets by redis-py, which move the same bytes.

    Puts have new keys, as those of the store: a server that replaces values reuses their memory.
    """
    try:
        module: Any = importlib.import_module("redis")
    except ImportError:
        bench.note("redis-py is not installed: no control of Redis but a copy in memory; pip install redis")
        return {}, {}
    client = stack.enter_context(module.Redis(unix_socket_path=str(path)))
    rounds = counted()
    # Values without a time to live, which the server does not drop. Those of the puts are the first that it drops.
    kept = _new_names("kept", rounds, len(written.rows))

    def keep() -> None:
        for name, row in zip(kept, written.rows, strict=True):
            client.set(name, row.data)

    def put() -> None:
        for name, row in zip(_new_names("control", rounds, len(written.rows)), written.rows, strict=True):
            client.set(name, row.data, ex=600)

    def get() -> None:
        for name, row in zip(kept, read.rows, strict=True):
            row[:] = np.frombuffer(client.get(name), np.uint8)

    def put_all() -> None:
        names = _new_names("control", rounds, len(written.rows))
        with client.pipeline(transaction=False) as pipeline:
            for name, row in zip(names, written.rows, strict=True):
                pipeline.set(name, row.data, ex=600)
            pipeline.execute()

    def get_all() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for name in kept:
                pipeline.get(name)
            for value, row in zip(pipeline.execute(), read.rows, strict=True):
                row[:] = np.frombuffer(value, np.uint8)

    keep()
    return {SET: put, PIPELINE: put_all}, {SET: Job(get, before=keep), PIPELINE: Job(get_all, before=keep)}
