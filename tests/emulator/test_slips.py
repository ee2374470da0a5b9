"""Faults of one line, each caught with what it is, and where."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pagecore.errors import DeviceError
from tests.cuda.kit import Kit
from tests.emulator.probing import KERNELS, probe
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

pytestmark = pytest.mark.slow

NEVER = 10**9


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def kit(request):
    return Kit(EmulatedRuntime(KERNELS, seed=request.param))


def slip(kit, n, m=0, **arguments):
    given = {"threads": 64, "shared_bytes": 1024} | arguments
    given.setdefault("input", kit.put(np.arange(256, dtype=np.int32)))
    given.setdefault("output", kit.put(np.zeros(64, np.int32)))
    probe(kit.runtime, "slips", n=n, m=m, **given)
    return kit.get(given["output"])


@pytest.mark.parametrize(
    ("n", "m", "message"),
    [
        (1, 193, "reads 4 bytes at 0x[0-9a-f]+, 0 bytes behind the end of the allocation of 1024 bytes"),
        (1, 500, "reads 4 bytes at .* bytes behind the end of the allocation of 1024 bytes"),
        (2, -1, "writes 4 bytes at .*, 4 bytes before the allocation of 256 bytes"),
        (2, -(2**31), "writes 4 bytes at .* bytes before the allocation of 256 bytes"),
        (3, 193, "writes 4 bytes at offset 1024 of the shared buffer, which has 1024 bytes"),
        (3, -1, "writes 4 bytes at offset -4 of the shared buffer"),
        (4, 0, "reads what nobody has written: offset"),
        (5, 0, "writes at 0x[0-9a-f]+, which is no multiple of 16"),
        (6, 0, "writes 16 bytes at offset [0-9]+ of the shared buffer, which is no multiple of 16"),
        (7, 0, "reads at 0x[0-9a-f]+, which is no multiple of 4"),
        (8, 0, "pc_sync_warp is reached by a part of the warp: thread [0-9]+ "),
        (9, 0, "pc_sync_block is reached by "),
        (10, 0, r"pc_s[a-z_]+ is reached by a part of the warp: thread [0-9]+ is at pc_s[a-z_]+ \(line [0-9]+\)"),
        (11, 0, r"pc_s[a-z_]+ is reached by a part of the warp: thread [0-9]+ is at pc_s[a-z_]+ \(line [0-9]+\)"),
        (12, 0, "pc_sync_block is reached by a part of the block: 32 threads are at that of line"),
        (13, 0, "finishes with 1 copies in flight"),
        (14, 0, "finishes with 1 copies in flight"),
        (15, 0, r"writes what the copy of thread [0-9]+ \(line [0-9]+\) has in flight"),
        (16, 0, "copies to 16 bytes at offset [0-9]+ of the shared buffer, which is no multiple of 16"),
        (17, 0, "copies at 0x[0-9a-f]+, which is no multiple of 16"),
        (18, 4, "copies 16 bytes at .* 0 bytes behind the end of the allocation of 1024 bytes"),
        (19, 0, "a sum overflows its type"),
        (20, 1, "an index lies outside a local array"),
        (21, 32, "a shift by more bits"),
        (23, 0, "races|nobody has written"),
        (24, 0, "races|nobody has written"),
        (25, 0, "races|nobody has written"),
        (26, 0, r"races: it (reads|writes) what thread [0-9]+ (reads|writes) \(line [0-9]+\), without a barrier"),
        (27, 0, r"races: it writes what thread [0-9]+ writes \(line [0-9]+\), without a barrier"),
        (28, 0, "races: it writes what thread [0-9]+ reads"),
        (29, 0, "slips, .*thread 37 .*reads 16 bytes at offset [0-9]+ of the shared buffer, which is no multiple"),
        (30, 0, "pc_sync_block is reached by .* finished"),
        (31, 0, "pc_ballot is reached by a part of the warp"),
        (33, 0, "accesses to device memory without a barrier or collective: does it wait for another block"),
        (32, 0, "reads 4 bytes at 0x[0-9a-f]+, at or near the null pointer"),
    ],
)
def test_a_slip_is_named(kit, n, m, message):
    with pytest.raises(EmulatorError, match=message) as caught:
        slip(kit, n, m)
    assert re.match(r"slips, block \(0, 0, 0\), thread \d+ \(warp \d, lane \d+\), slips.cu:\d+: ", str(caught.value))
    # The next launch finds everything in order.
    np.testing.assert_array_equal(slip(kit, 0), np.arange(64))


def test_halves_of_a_word_belong_to_whoever_writes_them(kit):
    np.testing.assert_array_equal(slip(kit, 22), np.arange(64)[::-1])


def test_memory_is_not_used_after_it_was_freed(kit):
    address, memory = kit.runtime.allocate(64, 0, 0)
    stale = type("Stale", (), {"pointer": address})
    memory.free()
    with pytest.raises(EmulatorError, match=r"\d+ bytes (into|behind the end of) the freed allocation of 64 bytes"):
        slip(kit, 0, input=stale)


def test_an_allocation_beside_another_is_not_reached_from_it(kit):
    here, there = kit.empty(64, "int32"), kit.empty(64, "int32")
    assert there.pointer > here.pointer
    with pytest.raises(EmulatorError, match="behind the end of the allocation of 256 bytes"):
        slip(kit, 1, (there.pointer - here.pointer) // 4, input=here)


def test_a_warp_that_the_launch_does_not_fill_has_no_collectives(kit):
    with pytest.raises(EmulatorError, match="pc_ballot wants 32 lanes; this warp has 8"):
        slip(kit, 31, threads=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 65}, "65 threads a block; it is declared for at most 64"),
        ({"threads": 0}, "0 threads a block"),
        ({"grid": (1, 65536, 1)}, "grid of"),
        ({"grid": (0, 1, 1)}, "grid of"),
        ({"shared_bytes": 228 * 1024}, "a block has 232448"),
    ],
)
def test_a_launch_that_no_device_takes_is_refused(kit, arguments, message):
    with pytest.raises(DeviceError, match=message):
        slip(kit, NEVER, **arguments)


def test_the_parameters_are_of_the_kernel_s_struct(kit):
    with pytest.raises(DeviceError, match="slips takes a struct of 32 bytes, not of 8"):
        kit.runtime.run("slips", (1, 1, 1), 32, 0, bytes(8))


def test_a_kernel_that_the_manifest_does_not_list_is_refused(kit):
    with pytest.raises(DeviceError, match="the manifest has no kernel slip<int>"):
        kit.runtime.run("slip<int>", (1, 1, 1), 32, 0, b"")
