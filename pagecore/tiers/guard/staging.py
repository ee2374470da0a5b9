"""Staging memory: bounded host memory for transfers that may continue after their batch was abandoned."""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from dataclasses import dataclass

from pagecore.tiers.arguments import ALIGNMENT


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Pages of the staging memory: an address and whole pages in bytes."""

    address: int
    nbytes: int


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to pages of 4,096 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class StagingMemory:
    """Anonymous memory of a fixed size, given out in whole pages of 4,096 bytes, first fit.

    Invariants: free regions are sorted, disjoint and not adjacent; each page is free, in use or lost. The transfer of a
    lost region was abandoned and may still write; the region comes back when the transfer ends (`give`) or when its
    client was destroyed (`recover`). Not safe for use by several threads.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = whole_pages(nbytes)
        self._mmap: mmap.mmap | None = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mmap))
        self._free = [Region(self.address, self.nbytes)]
        self._taken: set[Region] = set()  # in use or lost
        self._lost: set[Region] = set()

    @property
    def lost_regions(self) -> frozenset[Region]:
        """Regions of abandoned transfers."""
        return frozenset(self._lost)

    @property
    def lost_bytes(self) -> int:
        """Bytes of the lost regions."""
        return sum(region.nbytes for region in self._lost)

    @property
    def used_bytes(self) -> int:
        """Bytes in use by transfers that were not abandoned."""
        return sum(region.nbytes for region in self._taken) - self.lost_bytes

    @property
    def num_regions(self) -> int:
        """Number of regions in use or lost."""
        return len(self._taken)

    def take(self, sizes: list[int]) -> list[Region] | None:
        """Return a region for each size in bytes; None, and nothing is taken, unless all fit."""
        taken: list[Region] = []
        try:
            for size in sizes:
                region = self._first_fit(whole_pages(size))
                if region is None:
                    break
                taken.append(region)
        except BaseException:
            self.give_all(taken)
            self._refill()
            raise
        if len(taken) == len(sizes):
            return taken
        self.give_all(taken)
        return None

    def give(self, region: Region) -> None:
        """Return a region, in use or lost, whose transfer has ended."""
        try:
            self._lost.discard(region)
            self._taken.remove(region)
            self._release(region)
        except BaseException:
            self._refill()
            raise

    def give_all(self, regions: list[Region]) -> None:
        """Return regions that no transfer has used."""
        for region in regions:
            self.give(region)

    def lose(self, region: Region) -> None:
        """Mark a region whose transfer was abandoned, if it is in use."""
        if region in self._taken:
            self._lost.add(region)

    def recover(self) -> None:
        """Return all lost regions; the client that might have written to them is destroyed."""
        for region in list(self._lost):
            self.give(region)

    def close(self) -> None:
        """Unmap the memory; no transfer may be under way."""
        if self._mmap is not None:
            self._mmap.close()
            self._mmap = None

    def check_invariants(self) -> None:
        """Raise AssertionError unless free and taken regions cover the memory exactly once."""
        assert self._lost <= self._taken, "a lost region is free"
        regions = sorted([*self._free, *self._taken])
        end = self.address
        for region in regions:
            assert region.address == end, f"regions overlap or leave a hole at {region}"
            end = region.address + region.nbytes
        assert end == self.address + self.nbytes, "pages are missing at the end"
        for before, after in zip(self._free, self._free[1:], strict=False):
            assert before.address + before.nbytes < after.address, f"{before} and {after} are not merged"

    def _first_fit(self, size: int) -> Region | None:
        for index, region in enumerate(self._free):
            if region.nbytes >= size:
                if region.nbytes == size:
                    del self._free[index]
                else:
                    self._free[index] = Region(region.address + size, region.nbytes - size)
                taken = Region(region.address, size)
                self._taken.add(taken)
                return taken
        return None

    def _release(self, region: Region) -> None:
        insort(self._free, region)
        index = self._free.index(region)
        if index + 1 < len(self._free):
            self._merge(index)
        if index > 0:
            self._merge(index - 1)

    def _refill(self) -> None:
        """Let the free regions be what is neither in use nor lost, after an interrupt."""
        free, at = [], self.address
        for region in [*sorted(self._taken), Region(self.address + self.nbytes, 0)]:
            if region.address > at:
                free.append(Region(at, region.address - at))
            at = region.address + region.nbytes
        self._free = free

    def _merge(self, index: int) -> None:
        before, after = self._free[index], self._free[index + 1]
        if before.address + before.nbytes == after.address:
            self._free[index : index + 2] = [Region(before.address, before.nbytes + after.nbytes)]
