"""Faults of one line: the emulator reports the kind and the place of each."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pagecore.errors import DeviceError
from tests.cuda.kit import Kit
from tests.emulator.probing import KERNELS, enum_of, probe
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

pytestmark = pytest.mark.slow

Slip = enum_of("slips.cu", "Slip")


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def kit(request):
    return Kit(EmulatedRuntime(KERNELS, seed=request.param))


def slip(kit, which, m=0, **arguments):
    given = {"threads": 64, "shared_bytes": 1024} | arguments
    given.setdefault("input", kit.put(np.arange(256, dtype=np.int32)))
    given.setdefault("output", kit.put(np.zeros(64, np.int32)))
    probe(kit.runtime, "slips", n=which, m=m, **given)
    return kit.get(given["output"])


@pytest.mark.parametrize(
    ("which", "m", "message"),
    [
        (Slip.READ_GLOBAL, 193, "reads 4 bytes at 0x[0-9a-f]+, 0 bytes after the end of the allocation of 1024 bytes"),
        (Slip.READ_GLOBAL, 500, "reads 4 bytes at .* bytes after the end of the allocation of 1024 bytes"),
        (Slip.WRITE_GLOBAL, -1, "writes 4 bytes at .*, 4 bytes before the allocation of 256 bytes"),
        (Slip.WRITE_GLOBAL, -(2**31), "writes 4 bytes at .* bytes before the allocation of 256 bytes"),
        (Slip.WRITE_SHARED, 193, "writes 4 bytes at offset 1024 of the shared buffer, which has 1024 bytes"),
        (Slip.WRITE_SHARED, -1, "writes 4 bytes at offset -4 of the shared buffer"),
        (Slip.READ_UNINITIALISED, 0, "reads uninitialised memory: offset"),
        (Slip.MISALIGNED_GLOBAL_VECTOR, 0, "writes at 0x[0-9a-f]+, which is not a multiple of 16"),
        (
            Slip.MISALIGNED_SHARED_VECTOR,
            0,
            "writes 16 bytes at offset [0-9]+ of the shared buffer, which is not a multiple of 16",
        ),
        (Slip.MISALIGNED_GLOBAL_READ, 0, "reads at 0x[0-9a-f]+, which is not a multiple of 4"),
        (Slip.WARP_BARRIER_UNDER_DIVERGENCE, 0, "pc_sync_warp is reached by a part of the warp: thread [0-9]+ "),
        (Slip.BLOCK_BARRIER_UNDER_DIVERGENCE, 0, "pc_sync_block is reached by "),
        (
            Slip.DIFFERENT_COLLECTIVES,
            0,
            r"pc_s[a-z_]+ is reached by a part of the warp: thread [0-9]+ is at pc_s[a-z_]+ \(line [0-9]+\)",
        ),
        (
            Slip.DIFFERENT_BARRIERS,
            0,
            r"pc_s[a-z_]+ is reached by a part of the warp: thread [0-9]+ is at pc_s[a-z_]+ \(line [0-9]+\)",
        ),
        (
            Slip.BARRIERS_ON_DIFFERENT_LINES,
            0,
            "pc_sync_block is reached by a part of the block: 32 threads are at the barrier of line",
        ),
        (Slip.COPY_WITHOUT_WAIT, 0, "finishes with 1 copies in flight"),
        (Slip.COPY_WITHOUT_COMMIT, 0, "finishes with 1 copies in flight"),
        (Slip.WRITE_UNDER_COPY, 0, r"writes what the copy of thread [0-9]+ \(line [0-9]+\) has in flight"),
        (
            Slip.MISALIGNED_COPY_TARGET,
            0,
            "copies to 16 bytes at offset [0-9]+ of the shared buffer, which is not a multiple of 16",
        ),
        (Slip.MISALIGNED_COPY_SOURCE, 0, "copies at 0x[0-9a-f]+, which is not a multiple of 16"),
        (Slip.COPY_GLOBAL, 4, "copies 16 bytes at .* 0 bytes after the end of the allocation of 1024 bytes"),
        (Slip.OVERFLOW_OF_SUM, 0, "a sum overflows its type"),
        (Slip.INDEX_OF_LOCAL_ARRAY, 1, "an index lies outside a local array"),
        (Slip.SHIFT, 32, "a shift by more bits"),
        (Slip.RACE_ON_HALVES, 0, "races|uninitialised"),
        (Slip.RACE_DESPITE_SHUFFLE, 0, "races|uninitialised"),
        (Slip.RACE_BETWEEN_WARPS, 0, "races|uninitialised"),
        (
            Slip.WRITE_AFTER_READ,
            0,
            r"races: it (reads|writes) what thread [0-9]+ (reads|writes) \(line [0-9]+\), without a barrier",
        ),
        (Slip.WRITE_AFTER_WRITE, 0, r"races: it writes what thread [0-9]+ writes \(line [0-9]+\), without a barrier"),
        (Slip.WRITE_AFTER_MATRIX_READ, 0, "races: it writes what thread [0-9]+ reads"),
        (
            Slip.MISALIGNED_MATRIX_ROW,
            0,
            "slips, .*thread 37 .*reads 16 bytes at offset [0-9]+ of the shared buffer, which is not a multiple",
        ),
        (Slip.BARRIER_AFTER_RETURN, 0, "pc_sync_block is reached by .* finished"),
        (Slip.COLLECTIVE_OF_PART, 0, "pc_ballot is reached by a part of the warp"),
        (
            Slip.ENDLESS_WAIT,
            0,
            "accesses to device memory without a barrier or collective: does it wait for another block",
        ),
        (Slip.NULL_POINTER, 0, "reads 4 bytes at 0x[0-9a-f]+, at or near the null pointer"),
    ],
)
def test_a_slip_is_named(kit, which, m, message):
    with pytest.raises(EmulatorError, match=message) as caught:
        slip(kit, which, m)
    assert re.match(r"slips, block \(0, 0, 0\), thread \d+ \(warp \d, lane \d+\), slips.cu:\d+: ", str(caught.value))
    # The next launch runs without an error.
    np.testing.assert_array_equal(slip(kit, Slip.NONE), np.arange(64))


def test_two_threads_may_write_the_halves_of_a_word(kit):
    np.testing.assert_array_equal(slip(kit, Slip.HALVES_OF_A_WORD), np.arange(64)[::-1])


def test_use_of_freed_memory_is_named(kit):
    address, memory = kit.runtime.allocate(64, 0, 0)
    stale = type("Stale", (), {"pointer": address})
    memory.free()
    with pytest.raises(EmulatorError, match=r"\d+ bytes (into|after the end of) the freed allocation of 64 bytes"):
        slip(kit, Slip.NONE, input=stale)


def test_an_allocation_is_not_reached_from_its_neighbour(kit):
    here, there = kit.empty(64, "int32"), kit.empty(64, "int32")
    assert there.pointer > here.pointer
    with pytest.raises(EmulatorError, match="after the end of the allocation of 256 bytes"):
        slip(kit, Slip.READ_GLOBAL, (there.pointer - here.pointer) // 4, input=here)


def test_a_partly_filled_warp_cannot_run_collectives(kit):
    with pytest.raises(EmulatorError, match="pc_ballot needs 32 lanes; this warp has 8"):
        slip(kit, Slip.COLLECTIVE_OF_PART, threads=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 65}, "65 threads a block; it is declared for at most 64"),
        ({"threads": 0}, "0 threads a block"),
        ({"grid": (1, 65536, 1)}, "grid of"),
        ({"grid": (0, 1, 1)}, "grid of"),
        ({"shared_bytes": 228 * 1024}, "a block has 101376"),
    ],
)
def test_an_impossible_launch_is_refused(kit, arguments, message):
    with pytest.raises(DeviceError, match=message):
        slip(kit, Slip.NONE, **arguments)


def test_parameters_of_another_size_are_refused(kit):
    with pytest.raises(DeviceError, match="slips takes a struct of 32 bytes, not of 8"):
        kit.runtime.run("slips", (1, 1, 1), 32, 0, bytes(8))


def test_an_unlisted_kernel_is_refused(kit):
    with pytest.raises(DeviceError, match="the manifest has no kernel slip<int>"):
        kit.runtime.run("slip<int>", (1, 1, 1), 32, 0, b"")
