"""Commands with time limits, run one after another with their output in files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Seconds from the interrupt to the kill; pytest uses them to list failures.
GRACE_S = 5.0
LATE = 124  # exit status of timeout(1)


@dataclass(frozen=True, slots=True)
class Step:
    """A command and its time limit, with up to `extra_s` more if earlier steps have left that of their limits."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    extra_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step: exit code (124 if it took too long), time, and last line of output."""

    code: int
    seconds: float
    last: str

    @property
    def verdict(self) -> str:
        if self.code < 0:
            return f"signal {-self.code}"
        return {0: "passed", LATE: "took too long"}.get(self.code, f"failed ({self.code})")


def run_step(step: Step, limit_s: float, output: Path, environment: Mapping[str, str], folder: Path) -> Outcome:
    """Run one command with its output in a file; at the limit, end its process group.

    A step that cannot be started fails with the reason in its output, and a step without time left is not started.
    """
    begin = time.monotonic()
    with output.open("wb") as file:
        if limit_s <= 0:
            file.write(b"no time left for this step\n")
            code = LATE
        else:
            try:
                with _accepting_interrupts():
                    process = subprocess.Popen(
                        step.command,
                        cwd=folder,
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                file.write(f"{step.command[0]} cannot be started: {error}\n".encode())
                code = 127
            else:
                code = _wait(process, limit_s)
    lines = output.read_bytes().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Outcome(code, round(time.monotonic() - begin, 1), last)


@contextlib.contextmanager
def _accepting_interrupts() -> Iterator[None]:
    """Let a step that begins now be interrupted, even if this process ignores interrupts as a background job does.

    A child inherits what its parent ignores. A `preexec_fn` would have to fork the interpreter, which is not safe with
    the threads of a framework.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Wait for a process up to its limit; then interrupt its group, and kill the remaining processes."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    return LATE


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def trimmed(text: bytes, size: int) -> bytes:
    """Return about `size` bytes of a longer text: its first quarter and its end."""
    if len(text) <= size:
        return text
    cut = len(text) - size
    return text[: size // 4] + f"\n... {cut:,} bytes left out ...\n".encode() + text[size // 4 + cut :]


def tail(text: bytes, num_lines: int, width: int) -> str:
    """Return the last lines of a text, each truncated to `width`."""
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return "".join(f"{line[:width]}\n" for line in lines[-num_lines:])
