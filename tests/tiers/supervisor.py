"""Run a server until its owner ends: ``python supervisor.py OWNER_PID COMMAND...``; needs the standard library alone.

The supervisor ends the server when the owner is gone, even by SIGKILL, and the kernel ends the server when the
supervisor is gone.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent():
    """Let the kernel kill this process when the thread that made it ends; for ``preexec_fn``."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(owner, *command):
    watched = select.poll()
    watched.register(os.pidfd_open(int(owner)), select.POLLIN)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent) as server:  # noqa: PLW1509
        watched.register(os.pidfd_open(server.pid), select.POLLIN)
        watched.poll()
        server.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
