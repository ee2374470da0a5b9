"""NUMA nodes of the host: lists of the kernel, checks of a node, and binding."""

import ctypes
import platform

import numpy as np
import pytest

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage.memory import numa
from pagecore.storage.memory.host_memory import HostMemory

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def nodes(folder, listed, cpus="0-1023", kilobytes=1 << 40):
    """Write the files of the kernel that describe nodes."""
    (folder / "online").write_text(listed + "\n")
    for node in numa.parse_list(listed):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(cpus + "\n")
        (folder / f"node{node}" / "meminfo").write_text(f"Node {node} MemTotal:       {kilobytes} kB\n")
    return folder


@pytest.mark.parametrize(
    ("text", "numbers"), [("0\n", (0,)), ("0-3", (0, 1, 2, 3)), ("0,2-3,8\n", (0, 2, 3, 8)), ("\n", ())]
)
def test_lists_of_the_kernel_are_read(text, numbers):
    assert numa.parse_list(text) == numbers


def test_a_node_that_does_not_exist_is_refused_by_name(tmp_path):
    folder = nodes(tmp_path, "0,2")
    assert numa.checked_node(np.int64(2), folder) == 2
    with pytest.raises(UnsupportedOption, match="numa_node is 1; this host has the nodes 0, 2"):
        numa.checked_node(1, folder)
    for wrong in (-1, 0.5, "0"):
        with pytest.raises(ShapeError, match="numa_node"):
            numa.checked_node(wrong, folder)
    assert numa.checked_node(0, tmp_path / "none") == 0


def test_a_node_without_the_memory_is_refused(tmp_path):
    with pytest.raises(NotEnoughMemory, match=r"node 0 has 4,096 bytes, and 8,192"):
        numa.bind(0, 8192, 0, nodes(tmp_path, "0", kilobytes=4))
    assert numa.node_bytes(1, tmp_path) is None
    assert numa.cpus_of(1, tmp_path) == set()
    assert numa.cpus_of(0, tmp_path)


def test_a_bind_that_the_system_refuses_is_an_error_where_there_are_other_nodes(tmp_path):
    page = HostMemory(4096)
    with pytest.raises(UnsupportedOption, match=r"cannot be bound to NUMA node 700"):
        numa.bind(page.address, page.nbytes, 700, nodes(tmp_path, "0,700"))
    (tmp_path / "one").mkdir()
    numa.bind(page.address, page.nbytes, 700, nodes(tmp_path / "one", "700"))


@pytest.mark.skipif(platform.machine() not in GET_MEMPOLICY, reason="get_mempolicy has another number here")
def test_memory_of_a_node_is_bound_to_it():
    def policy(address):
        mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
        libc = ctypes.CDLL(None)
        number = GET_MEMPOLICY[platform.machine()]
        failed = libc.syscall(number, ctypes.byref(mode), mask, 16 * 64 + 1, ctypes.c_void_p(address), 2)
        return None if failed else (mode.value, mask[0])

    free, bound = HostMemory(1 << 16), HostMemory(1 << 16, numa_node=0)
    if policy(free.address) is None:
        pytest.skip("the system does not permit get_mempolicy")
    assert policy(free.address)[0] == 0
    assert policy(bound.address) == (2, 1)
