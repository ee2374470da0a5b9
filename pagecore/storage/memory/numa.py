"""NUMA nodes of the host: the nodes that exist, their processors and memory, and binding of memory to one."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import SupportsIndex

from pagecore.errors import NotEnoughMemory, UnsupportedOption
from pagecore.storage.checks import require_int, shown

NODES = Path("/sys/devices/system/node")
# mbind has no wrapper in the C library; libnuma only adds one.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def online_nodes(folder: Path = NODES) -> tuple[int, ...]:
    """Return the numbers of the NUMA nodes; a kernel that does not know NUMA has node 0."""
    try:
        return parse_list((folder / "online").read_text())
    except OSError:
        return (0,)


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list, such as "0-2,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def checked_node(node: SupportsIndex, folder: Path = NODES) -> int:
    """Return `node` as an int; raise UnsupportedOption if the host does not have it, ShapeError for other values."""
    number = require_int("numa_node", node, min=0, max=None)
    nodes = online_nodes(folder)
    if number not in nodes:
        listed = ", ".join(map(str, nodes))
        raise UnsupportedOption(
            f"numa_node is {shown(number)}; this host has the nodes {listed}: use one of them, or None"
        )
    return number


def cpus_of(node: int, folder: Path = NODES) -> set[int]:
    """Return the processors of a node on which this process may run; empty if they are unknown."""
    try:
        listed = parse_list((folder / f"node{node}" / "cpulist").read_text())
    except OSError:
        return set()
    return set(listed) & os.sched_getaffinity(0)


def node_bytes(node: int, folder: Path = NODES) -> int | None:
    """Return the memory of a node in bytes; None if it is unknown."""
    try:
        found = re.search(r"MemTotal:\s*(\d+) kB", (folder / f"node{node}" / "meminfo").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def bind(address: int, nbytes: int, node: int, folder: Path = NODES) -> None:
    """Bind untouched pages to a node (mbind with MPOL_BIND).

    Raises
    ------
    NotEnoughMemory
        The node has less memory in all.
    UnsupportedOption
        The system does not permit the call, as in containers without CAP_SYS_NICE, and the host has other nodes.
    """
    has = node_bytes(node, folder)
    if has is not None and nbytes > has:
        raise NotEnoughMemory(f"NUMA node {node} has {has:,} bytes, and {nbytes:,} are requested; request less")
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    number = _MBIND.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)  # its calls run without the GIL
        # The kernel counts one bit less than it is passed.
        arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_BIND, mask, words * _WORD_BITS + 1, 0)
        if libc.syscall(number, *arguments) == 0:
            return
        cause = os.strerror(ctypes.get_errno())
    else:
        cause = f"mbind is unknown on {platform.machine()}"
    if online_nodes(folder) != (node,):  # on a host of one node, all memory is on it
        raise UnsupportedOption(
            f"memory cannot be bound to NUMA node {node} ({cause}); give the container CAP_SYS_NICE, start the process "
            "under `numactl --membind`, or pass numa_node=None"
        )
