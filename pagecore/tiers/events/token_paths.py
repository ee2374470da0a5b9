"""Blocks by their token ids, for publishers whose hashes are not pagecore's.

P1: a block has an entry while a place holds it, or while a block that follows it has an entry. A walk therefore also
    finds blocks after one that has left a window.
P2: `_blocks` has the keys of an entry; there are none iff the token ids of its block are not known.

P3: `_blocks` has every block of a key. There are several if the publisher keeps apart what it does not list, such as
    SGLang's `extra_key`: equal tokens then have several hashes, and a walk follows all of them.

Groups of a publisher may have blocks of several sizes. A hash then names all blocks that end at the same token: its
entry has a key for each size, which the length of the content distinguishes.

The keys and values of EAGLE's draft layers depend on the next token, too. SGLang then sends pairs of tokens, so that a
block of n pairs is found by n + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.sequences._sequences import token_ids
from pagecore.errors import PagecoreError
from pagecore.tiers.events.wire import BlockHash, Event, EventFormatError, encodable

# The hash of the block before, the namespace of a first block, the int32 token ids or pairs of them, extra keys.
Key = tuple[BlockHash | None, str | None, bytes, Hashable]
PAIRS = b"pairs"  # before the content of blocks of pairs


@dataclass(slots=True)
class _Entry:
    keys: list[Key] = field(default_factory=list)
    uses: int = 0  # places that hold the block, and keys of blocks after it


class TokenPaths:
    """Hashes of blocks by the hash of the block before them and their content."""

    def __init__(self) -> None:
        self._blocks: dict[Key, tuple[BlockHash, ...]] = {}
        self._entries: dict[BlockHash, _Entry] = {}
        self._has_pairs = False

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._entries.clear()
        self._has_pairs = False

    def add(self, block: BlockHash, key: Key | None) -> None:
        """Note that one more place holds a block; `key` is None if its token ids are not known."""
        entry = self._entries.setdefault(block, _Entry())
        entry.uses += 1
        if key is None or any(len(key[2]) == len(known[2]) for known in entry.keys):
            return
        entry.keys.append(key)
        self._blocks[key] = (*self._blocks.get(key, ()), block)
        self._has_pairs |= key[2].startswith(PAIRS)
        if key[0] is not None:
            self._entries.setdefault(key[0], _Entry()).uses += 1

    def remove(self, block: BlockHash) -> None:
        """Note that one place fewer holds a block."""
        left = [block]
        while left:
            at = left.pop()
            entry = self._entries[at]
            entry.uses -= 1
            if entry.uses:
                continue
            del self._entries[at]
            for key in entry.keys:
                others = tuple(block for block in self._blocks.pop(key) if block != at)
                if others:
                    self._blocks[key] = others
                if key[0] is not None:
                    left.append(key[0])

    def walk(
        self, tokens: ArrayLike, block_size: int, namespace: str | None, extra_keys: Sequence[Any] | None
    ) -> list[tuple[BlockHash, ...]]:
        """Return the hashes of each whole block of a sequence, none from the first unknown block on."""
        ids = token_ids(tokens)
        count = len(ids) // block_size
        items = np.stack([ids[:-1], ids[1:]], axis=1) if self._has_pairs else ids
        found: list[tuple[BlockHash, ...]] = []
        name = None if namespace is None else encodable(namespace)
        for key in _keys(items, block_size, name, extra_keys):
            parents = found[-1] if found else (None,)
            blocks = tuple(chain.from_iterable(self._blocks.get((parent, *key), ()) for parent in parents))
            if not blocks:
                break
            found.append(blocks)
        return found + [()] * (count - len(found))


def event_keys(event: Event) -> list[Key | None]:
    """Return the key of each block of a BlockStored; None for blocks whose token ids it does not list.

    Raises
    ------
    EventFormatError
        The token ids are neither integers nor pairs of them.
    """
    hashes, size = event["block_hashes"], event["block_size"]
    if not event["token_ids"] or len(event["token_ids"]) != len(hashes) * size:
        return [None] * len(hashes)
    name, extra = event.get("lora_name"), event.get("extra_keys")
    parents = [event.get("parent_block_hash"), *hashes[:-1]]
    first = name if parents[0] is None else None
    if event.get("cache_salt") is not None and parents[0] is None:
        of_first, *others = extra or [None]
        extra = [[*(of_first or ()), event["cache_salt"]], *others]
    keys = _keys(_items(event["token_ids"]), size, name, extra)
    return [
        (parent, first if i == 0 else None, content, more)
        for i, (parent, (_, content, more)) in enumerate(zip(parents, keys, strict=True))
    ]


def joined(extra_keys: Sequence[Any] | None, step: int) -> list[Any] | None:
    """Return the extra keys of blocks that span `step` smaller ones each, which list each key once."""
    if extra_keys is None:
        return None
    together: list[Any] = []
    for first in range(0, len(extra_keys), step):
        keys: list[Any] = []
        for each in extra_keys[first : first + step]:
            keys += [key for key in each or () if _frozen(key, None) not in [_frozen(one, None) for one in keys]]
        together.append(keys or None)
    return together


def _items(listed: Sequence[Any]) -> NDArray[np.int32]:
    """Return token ids as int32 ``[n]``, pairs of them as ``[n, 2]``."""
    has_pairs = all(isinstance(each, list | tuple) and len(each) == 2 for each in listed)
    try:
        ids = token_ids([each for pair in listed for each in pair] if has_pairs else listed)
    except PagecoreError as error:
        raise EventFormatError(f"BlockStored has wrong token_ids: {error}") from None
    return ids.reshape(-1, 2) if has_pairs else ids


def _keys(
    items: NDArray[np.int32], block_size: int, name: str | None, extra_keys: Sequence[Any] | None
) -> Iterable[tuple[str | None, bytes, Hashable]]:
    """Yield namespace, content and extra keys of each block; only the first block has a namespace."""
    kind = PAIRS if items.ndim == 2 else b""
    for i in range(len(items) // block_size):
        content = kind + items[i * block_size : (i + 1) * block_size].tobytes()
        more = extra_keys[i] if extra_keys is not None and i < len(extra_keys) else None
        yield (name if i == 0 else None), content, _frozen(more, name)


def _frozen(extra: Any, name: str | None) -> Hashable:
    """Return the extra keys of a block as a tuple without the name of the adapter; None if there are none."""
    if not isinstance(extra, list | tuple):
        return extra if isinstance(extra, Hashable) else repr(extra)
    kept = tuple(_frozen(each, None) for each in extra if not (isinstance(each, str) and each == name))
    return kept or None
