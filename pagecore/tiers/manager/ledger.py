"""Ledger of a store: the blocks that it is known to have, and their changes, for events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.index import Change, RadixTree, chain_hashes
from pagecore.tiers.manager.port import Flags, Positions, Spans
from pagecore.tiers.store import Keys

__all__ = ["Ledger", "LedgerLog"]

MAX_BLOCKS = 1 << 20
# Bytes of a change in the memory that a journal may take.
CHANGE_BYTES = 256


@dataclass(frozen=True, slots=True)
class LedgerLog:
    """Changes of a ledger; the counterpart of `pagecore.index.ChangeLog`."""

    changes: list[Change]
    has_overflowed: bool = False

    def to_list(self) -> list[Change]:
        """Return the changes in order."""
        return self.changes


@dataclass(slots=True)
class _Block:
    lanes: dict[int, int]  # one bit for each store that has the entry
    change: Change
    keys: dict[int, bytes] | None = None  # content key of each lane, if a store names it by that


class Ledger:
    """The blocks that the stores of a medium are known to have: those that were written to them, or found in them.

    A store outlives the process and is shared, so that its contents are not listed anywhere. The ledger begins with the
    first publisher of events. A block that a store has lost goes when the store reports that or lists its entries, or
    when a look-up or a load misses it, and no other store of the medium has it; or when more than `max_blocks` newer
    ones are known. A failure of a store is not a miss.
    A component has a block if all of its lanes have it.

    Parameters
    ----------
    tree : RadixTree
        The tree of the host; the ledger has its components and block size.
    tree_lanes : sequence of int
        The group of each lane of the tree, groups without a window first.
    max_blocks : int
    """

    def __init__(self, tree: RadixTree, tree_lanes: Sequence[int], max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size, self.components = tree.block_size, tree.components
        num_full = len(tree_lanes) - len(tree.windows)
        self._component_of = dict.fromkeys(tree_lanes[:num_full], 0)
        self._component_of |= {group: 1 + index for index, group in enumerate(tree_lanes[num_full:])}
        if "state" in tree.components:
            self._component_of[len(tree_lanes)] = len(tree.components) - 1
        self._num_lanes = [list(self._component_of.values()).count(index) for index in range(len(tree.components))]
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        # Hash and lane of the entries of stores that report evictions, by content key.
        self._places: dict[bytes, tuple[int, int]] = {}
        self._journal: list[Change] | None = None
        self._max_changes = 0
        self._has_overflowed = False

    @property
    def is_recording(self) -> bool:
        """True while a publisher follows the ledger; otherwise it notes nothing."""
        return self._journal is not None

    # -- for stores ----------------------------------------------------------------------------------------------

    def note(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        lanes: Sequence[tuple[Positions, Flags]],
        *,
        store: int,
        forgets: bool,
        keys: Sequence[Keys] | None = None,
    ) -> None:
        """Note which entries of a prefix a store has.

        Parameters
        ----------
        lanes : sequence of (ndarray, ndarray)
            Positions of entries of each lane, and True for those that the store has.
        store : int
            Number of the store.
        forgets : bool
            The store has none of the others.
        keys : sequence of ndarray, optional
            Content keys of the entries of each lane, for `note_evicted`.
        """
        end = max((int(positions[-1]) + 1 for positions, _ in lanes if len(positions)), default=0)
        if self._journal is None or not end:
            return
        prefix = _Prefix(tokens[: end * self.block_size], self.block_size, namespace, spans)
        for lane, (positions, ok) in enumerate(lanes):
            for index, (position, is_there) in enumerate(zip(positions.tolist(), ok.tolist(), strict=True)):
                if is_there:
                    self._add(prefix, lane, position, store, None if keys is None else keys[lane][index].tobytes())
                elif forgets:
                    self._drop(prefix.hashes[position], lane, store)
        while len(self._blocks) > self._max_blocks:
            (block_hash, component), block = self._blocks.popitem(last=False)
            for key in (block.keys or {}).values():
                self._places.pop(key, None)
            self._note_removed(block_hash, component, block)

    def note_evicted(self, keys: Keys, *, store: int) -> None:
        """Note that a store has evicted entries, by content key."""
        for key in keys:
            place = self._places.get(key.tobytes())
            if place is not None:
                self._drop(*place, store)

    def note_listed(self, keys: Keys, *, store: int) -> None:
        """Note that a store has no entries but those that it lists now, by content key."""
        listed = {key.tobytes() for key in keys}
        for (block_hash, _), block in list(self._blocks.items()):
            names = block.keys or {}
            for lane in [lane for lane in block.lanes if names.get(lane) not in listed]:
                self._drop(block_hash, lane, store)

    def _add(self, prefix: _Prefix, lane: int, position: int, store: int, name: bytes | None) -> None:
        component = self._component_of[lane]
        key = prefix.hashes[position], component
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block({}, prefix.change(position, component))
        self._blocks.move_to_end(key)
        if name is not None:
            block.keys = block.keys or {}
            block.keys[lane] = name
            self._places[name] = key[0], lane
        is_new = lane not in block.lanes
        block.lanes[lane] = block.lanes.get(lane, 0) | 1 << store
        if is_new and len(block.lanes) == self._num_lanes[component]:
            self._write(block.change)

    def _drop(self, block_hash: int, lane: int, store: int) -> None:
        component = self._component_of[lane]
        block = self._blocks.get((block_hash, component))
        if block is None or not block.lanes.get(lane, 0) >> store & 1:
            return
        block.lanes[lane] &= ~(1 << store)
        if block.lanes[lane]:
            return
        self._note_removed(block_hash, component, block)
        del block.lanes[lane]
        if block.keys is not None and lane in block.keys:
            self._places.pop(block.keys.pop(lane), None)
        if not block.lanes:
            del self._blocks[block_hash, component]

    def _note_removed(self, block_hash: int, component: int, block: _Block) -> None:
        if len(block.lanes) == self._num_lanes[component]:
            self._write(Change(False, component, [block_hash]))

    def _write(self, change: Change) -> None:
        assert self._journal is not None
        if len(self._journal) >= self._max_changes:
            self._has_overflowed = True
        else:
            self._journal.append(change)

    # -- for publishers, as `RadixTree` --------------------------------------------------------------------------

    def start_journal(self, *, max_bytes: int = 64 << 20) -> None:
        """Record changes from now on, up to about `max_bytes`."""
        self._journal = []
        self._max_changes = max(1, max_bytes // CHANGE_BYTES)
        self._has_overflowed = False

    def stop_journal(self) -> None:
        """Record nothing any more, and forget all blocks."""
        self._journal = None
        self._blocks.clear()
        self._places.clear()

    def take_changes(self) -> LedgerLog:
        """Return the changes since the last call."""
        log = LedgerLog(self._journal or [], self._has_overflowed)
        self._journal, self._has_overflowed = [], False
        return log

    def list_contents(self) -> LedgerLog:
        """Return a change for each block that the store is known to have."""
        return LedgerLog(list(self._whole()))

    def _whole(self) -> Iterator[Change]:
        for (_, component), block in self._blocks.items():
            if len(block.lanes) == self._num_lanes[component]:
                yield block.change


class _Prefix:
    """A prompt and the content hashes of its blocks."""

    def __init__(self, tokens: NDArray[np.int32], block_size: int, namespace: Hashable, spans: Spans | None) -> None:
        self.hashes = chain_hashes(tokens, block_size, namespace=namespace, spans=spans).tolist()
        self._tokens, self._size, self._spans = tokens, block_size, tuple(spans or ())
        self._namespace = _encoded(namespace)

    def change(self, position: int, component: int) -> Change:
        """Return the change by which a component gets one block."""
        begin = position * self._size
        return Change(
            True,
            component,
            [self.hashes[position]],
            position,
            self.hashes[position - 1] if position else None,
            self._tokens[begin : begin + self._size].tolist(),
            self._namespace,
            [
                (0, start - begin, end - begin, bytes(digest) if isinstance(digest, bytes) else int(digest))
                for start, end, digest in sorted(self._spans, key=lambda span: span[0])
                if start < begin + self._size and end > begin
            ],
        )


def _encoded(namespace: Hashable) -> str | bytes | None:
    """Return a namespace as the journal of a tree has it."""
    if namespace is None or isinstance(namespace, str):
        return namespace
    tree = RadixTree(1)
    tree.start_journal()
    tree.insert([0], [1], namespace=namespace)
    return tree.list_contents().to_list()[0].namespace
