"""Regions of memory, for libraries that register memory before they move it."""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """One contiguous range of memory, as NIXL and Mooncake register it.

    Attributes
    ----------
    name : str
        Content, for messages and metadata.
    address, nbytes : int
    device : str
        "cpu", or a CUDA device such as "cuda:0".
    """

    name: str
    address: int
    nbytes: int
    device: str
