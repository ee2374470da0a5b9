"""Summaries of keys that an attention layer stores for sparse selection: their planes, and checks of their options."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.arrays import DType
from pagecore.errors import ShapeError
from pagecore.storage.checks import as_tuple, require_int
from pagecore.storage.specs.spec import Plane

Channels = tuple[tuple[int, ...], ...]


def checked_channels(given: Iterable[Iterable[int]], num_kv_heads: int, head_dim: int) -> Channels:
    """Return label channels as tuples, one for each key-value head; raise ShapeError for others."""
    what = f"one list of channels for each of {num_kv_heads} key-value heads"
    heads = as_tuple("label_channels", given, what)
    if len(heads) != num_kv_heads:
        raise ShapeError(f"label_channels has {len(heads)} lists; expected {what}")
    listed = tuple(
        tuple(
            require_int("an entry of label_channels", channel, min=0, max=head_dim - 1)
            for channel in as_tuple("an entry of label_channels", channels, what)
        )
        for channels in heads
    )
    if not listed[0] or any(len(channels) != len(listed[0]) for channels in listed):
        counts = ", ".join(str(len(channels)) for channels in listed)
        raise ShapeError(f"label_channels lists {counts} channels; expected equal numbers of at least 1")
    return listed


def summary_planes(
    heads: int, dim: int, dtype: DType, key_bounds: bool, channels: Channels | None
) -> tuple[Plane, ...]:
    """Return the planes "key_min" and "key_max" per block, and "label" per token, if the layer stores them."""
    names = ("key_min", "key_max") if key_bounds else ()
    bounds = tuple(Plane(name, (heads, dim), dtype, per="block") for name in names)
    labels = () if channels is None else (Plane("label", (heads, len(channels[0])), dtype),)
    return bounds + labels
