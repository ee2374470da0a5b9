"""Payloads as stores see them: memory at an address, and the frame that keeps length and sum next to a payload."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.keys import payload_sums
from pagecore.tiers.store import Keys, Pieces

# Little-endian: magic, bytes of the payload, and XXH3_64 of the payload seeded by the key.
FRAME = np.dtype([("magic", "<u8"), ("nbytes", "<u8"), ("sum", "<u8")])
FRAME_BYTES = FRAME.itemsize
MAGIC = int.from_bytes(b"pcblock1", "little")


def view(address: int, nbytes: int) -> memoryview:
    """Return memory at an address as writable bytes; the caller keeps the memory alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy memory without the GIL."""
    ctypes.memmove(target, source, nbytes)


def frames_of(keys: Keys, pieces: Pieces) -> NDArray[np.void]:
    """Return the frame of each payload, ``[n]`` of `FRAME`; sums are computed without the GIL."""
    frames = np.empty(len(keys), FRAME)
    frames["magic"] = MAGIC
    frames["nbytes"] = pieces[:, 1]
    frames["sum"] = payload_sums(keys, pieces)
    return frames


def length_in(frame: bytes | memoryview) -> int | None:
    """Return the length of the payload that a frame belongs to; None if it is not a frame."""
    if len(frame) != FRAME_BYTES:
        return None
    entry = np.frombuffer(frame, FRAME)[0]
    return int(entry["nbytes"]) if int(entry["magic"]) == MAGIC else None
