"""Blocks by their token ids, for publishers whose hashes are not pagecore's.

P1: a block has an entry while a place holds it, or while a block that follows it has an entry. A walk therefore also
    finds blocks after one that has left a window.
P2: `_blocks` has the key of an entry iff the token ids of its block are known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._sequence import token_ids
from pagecore.errors import PagecoreError
from pagecore.tiers.events.wire import BlockHash, Event, EventFormatError

# Hash of the block before, namespace of a first block, int32 token ids, extra keys.
Key = tuple[BlockHash | None, str | None, bytes, Hashable]


@dataclass(slots=True)
class _Entry:
    key: Key | None
    uses: int = 0  # places that hold the block, and entries of blocks after it


class TokenPaths:
    """Hash of each block by the hash of the block before it and its content."""

    def __init__(self) -> None:
        self._blocks: dict[Key, BlockHash] = {}
        self._entries: dict[BlockHash, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._entries.clear()

    def add(self, block: BlockHash, key: Key | None) -> None:
        """Note that one more place holds a block; `key` is None if its token ids are not known."""
        entry = self._entries.setdefault(block, _Entry(None))
        entry.uses += 1
        if key is None or entry.key is not None:
            return
        entry.key = key
        self._blocks[key] = block
        if key[0] is not None:
            self._entries.setdefault(key[0], _Entry(None)).uses += 1

    def remove(self, block: BlockHash) -> None:
        """Note that one place fewer holds a block."""
        at: BlockHash | None = block
        while at is not None:
            entry = self._entries[at]
            entry.uses -= 1
            if entry.uses:
                return
            del self._entries[at]
            if entry.key is None:
                return
            if self._blocks.get(entry.key) == at:
                del self._blocks[entry.key]
            at = entry.key[0]

    def walk(
        self, tokens: ArrayLike, block_size: int, namespace: str | None, extra_keys: Sequence[Any] | None
    ) -> list[BlockHash | None]:
        """Return the hash of each whole block of a sequence, None from the first unknown block on."""
        ids = token_ids(tokens)
        count = len(ids) // block_size
        found: list[BlockHash | None] = []
        for key in _keys(ids, block_size, namespace, extra_keys, count):
            block = self._blocks.get((found[-1] if found else None, *key))
            if block is None:
                break
            found.append(block)
        return found + [None] * (count - len(found))


def event_keys(event: Event) -> list[Key | None]:
    """Return the key of each block of a BlockStored; None for blocks whose token ids it does not list.

    Raises
    ------
    EventFormatError
        The token ids are not integers.
    """
    hashes, size = event["block_hashes"], event["block_size"]
    if not event["token_ids"] or len(event["token_ids"]) != len(hashes) * size:
        return [None] * len(hashes)
    try:
        ids = token_ids(event["token_ids"])
    except PagecoreError as error:
        raise EventFormatError(f"BlockStored has wrong token_ids: {error}") from None
    name, extra = event.get("lora_name"), event.get("extra_keys")
    parents = [event.get("parent_block_hash"), *hashes[:-1]]
    first = name if parents[0] is None else None
    keys = _keys(ids, size, name, extra, len(hashes))
    return [
        (parent, first if i == 0 else None, content, more)
        for i, (parent, (_, content, more)) in enumerate(zip(parents, keys, strict=True))
    ]


def _keys(
    ids: NDArray[np.int32], block_size: int, name: str | None, extra_keys: Sequence[Any] | None, count: int
) -> Iterable[tuple[str | None, bytes, Hashable]]:
    """Yield namespace, content and extra keys of each block; only the first block has a namespace."""
    for i in range(count):
        content = ids[i * block_size : (i + 1) * block_size].tobytes()
        more = extra_keys[i] if extra_keys is not None and i < len(extra_keys) else None
        yield (name if i == 0 else None), content, _frozen(more, name)


def _frozen(extra: Any, name: str | None) -> Hashable:
    """Return the extra keys of a block as a tuple without the name of the adapter; None if there are none."""
    if not isinstance(extra, list | tuple):
        return extra if isinstance(extra, Hashable) else repr(extra)
    kept = tuple(_frozen(each, None) for each in extra if not (isinstance(each, str) and each == name))
    return kept or None
