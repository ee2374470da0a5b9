"""Memory of the caller for a paged cache: the buffers of each group, and the blocks that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listed

from pagecore.arrays import Tensor
from pagecore.cache.layers.groups import Group
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage import KVLayout, KVPool
from pagecore.storage.checks import INT32_MAX, shown
from pagecore.storage.pools.adoption import Span, refuse_overlap, tensors_of
from pagecore.storage.pools.allocation import checked_allocator
from pagecore.storage.pools.layout import as_layout


def buffers_of(
    buffers: object,
    groups: Listed[Group],
    block_size: int,
    layout: str | KVLayout | None,
    memory: object,
    device: str,
) -> list[list[Tensor]] | None:
    """Return the caller's arrays of each group as tensors, in the order of its layout's buffers; None without buffers.

    Each array is imported once: a DLPack capsule can be read only once.

    Raises
    ------
    UnsupportedOption
        Buffers for a cache without bytes.
    ShapeError
        Both buffers and a budget, or the wrong number of entries or arrays.
    PagecoreError
        The errors of `as_tensor`.
    """
    if buffers is None:
        return None
    if device == "none":
        raise UnsupportedOption("buffers are given, but device is 'none': such a cache has no bytes; leave buffers out")
    if memory is not None:
        raise ShapeError(
            f"buffers are given and memory is {shown(memory)}, but buffers have a fixed size: leave memory out, or "
            "give num_blocks"
        )
    return [
        tensors_of(given, _one_block(group, block_size, layout), device)
        for given, group in zip(_split(buffers, len(groups)), groups, strict=True)
    ]


def check_source(allocator: object, buffers: object, device: str) -> None:
    """Raise UnsupportedOption for an allocator that the cache cannot use."""
    if checked_allocator(allocator) is None:
        return
    if buffers is not None:
        raise UnsupportedOption("buffers and allocator are given; give one of them")
    if device == "none":
        raise UnsupportedOption("allocator is given, but device is 'none': such a cache has no bytes; leave it out")


def count_adopted(
    given: Listed[Listed[Tensor]], groups: Listed[Group], block_size: int, layout: str | KVLayout | None
) -> list[int]:
    """Return the number of blocks that the buffers of each group hold.

    Raises
    ------
    NotEnoughMemory
        Fewer than two blocks in the buffers of a group.
    """
    counts = []
    for number, (tensors, group) in enumerate(zip(given, groups, strict=True)):
        one = _one_block(group, block_size, layout)
        held = min(tensor.nbytes // one.buffer_nbytes(i) for i, tensor in enumerate(tensors))
        if held < 2:
            raise NotEnoughMemory(
                f"the buffers of group {number} hold {held} blocks of {group.bytes_per_block(block_size)} bytes; at "
                "least 2 are needed, including the null block: pass larger buffers, or make block_size smaller"
            )
        counts.append(min(held, INT32_MAX))
    return counts


def refuse_shared(pools: Listed[KVPool]) -> None:
    """Raise UnsupportedOption if buffers of different groups share memory."""
    refuse_overlap(
        Span(f"{span.name} of group {number}", span.begin, span.end)
        for number, pool in enumerate(pools)
        for span in pool.spans
    )


def _one_block(group: Group, block_size: int, layout: str | KVLayout | None) -> KVLayout:
    order = as_layout("layerwise" if layout is None else layout)
    return order.bind(group.spec, group.num_layers, 1, block_size)


def _split(buffers: object, num_groups: int) -> list[object]:
    """Return one entry for each group; the entry of a single group may be given without a list."""
    listed = list(buffers) if isinstance(buffers, list | tuple) else None
    if num_groups == 1:
        is_wrapped = listed is not None and len(listed) == 1 and isinstance(listed[0], Mapping | list | tuple)
        return listed if is_wrapped and listed is not None else [buffers]
    if listed is None or len(listed) != num_groups:
        what = f"is a {type(buffers).__name__}" if listed is None else f"lists {len(listed)}"
        raise ShapeError(f"buffers {what}; the layers form {num_groups} groups: give a list with one entry for each")
    return listed
