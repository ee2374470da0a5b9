"""Mirror: the index of a cache, rebuilt from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.index import chain_hashes
from pagecore.storage.checks import flag, require_int, shown
from pagecore.tiers.events.token_paths import Key, TokenPaths, event_keys, joined
from pagecore.tiers.events.wire import CLEARED, COPIES_LEFT, STORED, Batch, BlockHash, Event


class MissingBatch(PagecoreError, LookupError):
    """A batch does not follow the last one that was applied; the state is unchanged.

    Attributes
    ----------
    is_restart : bool
        The batch is newer than the last one and has a lower number: the publisher was started again.
    """

    def __init__(self, message: str, is_restart: bool = False) -> None:
        super().__init__(message)
        self.is_restart = is_restart


class Mirror:
    """Blocks that a cache holds, by medium and group, as of one sequence number.

    The mirror after batch n equals the trees of the cache when batch n was taken. It has no sockets: `Subscriber` feeds
    it, or the caller.

    Parameters
    ----------
    by_tokens : bool
        True for publishers whose hashes are not pagecore's, such as vLLM: `match` finds blocks by the token ids of the
        events. It finds a block only if every block before it was announced, with its token ids, too.

    Attributes
    ----------
    sequence : int
        Number of the last batch; -1 before the first.
    block_size : int or None
        Tokens in a block; with `by_tokens` of the smallest on the device, or elsewhere. None before the first block.
    rank : int or None
        Data-parallel rank of the publisher.
    """

    def __init__(self, *, by_tokens: bool = False) -> None:
        self.sequence = -1
        self.block_size: int | None = None
        self.rank: int | None = None
        self._timestamp = -np.inf
        self._held: dict[tuple[str, int], dict[BlockHash, BlockHash | None]] = {}
        # Copies of a block beyond the first: vLLM has one for each prompt that computed the block at the same time.
        self._copies: Counter[tuple[str, int, BlockHash]] = Counter()
        # Blocks that were held before batches were lost, which may have removed them.
        self._doubtful: set[tuple[str, int, BlockHash]] = set()
        self._kinds: dict[int, tuple[str, int | None]] = {}
        self._sizes: dict[tuple[str, int], int] = {}  # of the largest block of a place, where they are listed
        self._paths = TokenPaths() if flag("by_tokens", by_tokens) else None

    # State.

    def blocks(self, medium: str = "GPU", group: int = 0) -> dict[BlockHash, BlockHash | None]:
        """Return the hash of each block, with the hash of the block before it (None for the first of a prefix)."""
        return dict(self._held.get((medium, group), {}))

    @property
    def places(self) -> list[tuple[str, int]]:
        """Media and groups that hold blocks."""
        return sorted(place for place, held in self._held.items() if held)

    def kind(self, group: int) -> tuple[str, int | None]:
        """Return the kind of a group's layers, and its window in tokens; ("full_attention", None) if unknown."""
        return self._kinds.get(group, ("full_attention", None))

    def match(
        self,
        tokens: ArrayLike,
        *,
        media: str | Sequence[str] = "GPU",
        namespace: Hashable = None,
        spans: Iterable[tuple[int, int, bytes | int]] | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> int:
        """Return the number of tokens of the longest prefix that the cache could reuse.

        Every group has to hold it in one of the media: whole, for a sliding window its end, for a state the block at
        its end. Sink tokens, and the lookahead of chunks, are not considered. The hashes must be pagecore's, or the
        mirror made with `by_tokens`.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens].
        media : str or sequence of str
            Media whose blocks count.
        namespace, spans
            As in `RadixTree.match`. With `by_tokens` the namespace is the name of the adapter, and spans are refused.
        extra_keys : sequence, optional
            With `by_tokens`: for each block of `block_size` tokens, what the publisher lists as its extra keys except
            for the name of the adapter (digests of media), or None. A salt is a key of the first block.

        Raises
        ------
        UnsupportedOption
            An argument that the mirror does not use; media that are not strings; or with `by_tokens` a namespace that
            is not a string, or extra keys that are not a list or tuple.
        ShapeError, UnsupportedDtype
            The tokens are not integers with one dimension.
        """
        media = tuple(media) if isinstance(media, Iterable) and not isinstance(media, str) else (media,)
        if not _is_list_of(media, (str,)):
            raise UnsupportedOption(f"media is {shown(media)}; expected a string, or a list of strings")
        self._check_options(namespace, spans, extra_keys)
        if self.block_size is None:
            return 0
        hashes = self._hashes_of(tokens, namespace, spans, extra_keys)
        count = len(hashes[self.block_size])
        usable = np.ones(count + 1, bool)  # by the number of blocks of the prefix
        for group in self._kinds:
            usable &= self._usable(self._there(group, media, hashes), *self._kinds[group])
            usable[np.arange(count + 1) % self._step_of(group) != 0] = False
        return int(np.flatnonzero(usable)[-1]) * self.block_size

    def _hashes_of(
        self, tokens: ArrayLike, namespace: Hashable, spans: Any, extra_keys: Sequence[Any] | None
    ) -> dict[int, list[tuple[BlockHash, ...]]]:
        """Return the hashes of each block of a sequence, for each size of blocks; none for those that are unknown."""
        size = self.block_size
        assert size is not None
        if self._paths is None:
            return {size: list(zip(chain_hashes(tokens, size, namespace=namespace, spans=spans).tolist()))}
        assert namespace is None or isinstance(namespace, str)
        hashes = {size: self._paths.walk(tokens, size, namespace, extra_keys)}
        for larger in {self._size_of(place) for place in self._sizes} - {size}:
            step = larger // size
            known = self._paths.walk(tokens, larger, namespace, joined(extra_keys, step))
            # A block has the hash of the last of the smaller blocks that it spans.
            same = hashes[size][step - 1 :: step]
            hashes[larger] = [one or other for one, other in zip(known, same, strict=True)]
        return hashes

    def _size_of(self, place: tuple[str, int]) -> int:
        """Return the tokens of the blocks of a place, in whole blocks of the smallest size."""
        assert self.block_size is not None
        size = self._sizes.get(place, self.block_size)
        return size if self._paths is not None and size % self.block_size == 0 else self.block_size

    def _step_of(self, group: int) -> int:
        """Return the number of smallest blocks in whose multiples a group can be reused."""
        assert self.block_size is not None
        sizes = [self._size_of(place) for place in self._sizes if place[1] == group]
        return min(sizes, default=self.block_size) // self.block_size

    def _there(
        self, group: int, media: tuple[str, ...], hashes: dict[int, list[tuple[BlockHash, ...]]]
    ) -> NDArray[np.bool_]:
        """Return True for the smallest blocks that a group has in one of the media, of states at their ends."""
        assert self.block_size is not None
        there = np.zeros(len(hashes[self.block_size]), bool)
        for medium in media:
            held, size = self._held.get((medium, group), {}).keys(), self._size_of((medium, group))
            step = size // self.block_size
            found = np.array([not held.isdisjoint(each) for each in hashes[size]], bool)
            if self._kinds[group][0] == "mamba":
                there[step - 1 :: step] |= found
            else:
                there[: len(found) * step] |= np.repeat(found, step)
        return there

    def _check_options(self, namespace: Hashable, spans: object, extra_keys: object) -> None:
        """Raise UnsupportedOption for options of `match` that this mirror does not use, or that have other types."""
        if self._paths is None:
            if extra_keys is not None:
                raise UnsupportedOption(
                    "extra_keys are for a mirror by token ids; make it with by_tokens=True, or use spans"
                )
            return
        if spans is not None:
            raise UnsupportedOption("spans are unknown to a mirror by token ids; give the publisher's extra_keys")
        if namespace is not None and not isinstance(namespace, str):
            raise UnsupportedOption(f"namespace is {shown(namespace)}; a mirror by token ids knows names of adapters")
        if extra_keys is not None and not _is_list_of(extra_keys, (list, tuple, type(None))):
            raise UnsupportedOption(
                f"extra_keys is {shown(extra_keys)}; expected a list with an entry for each block, a list or None"
            )

    def _usable(self, there: NDArray[np.bool_], kind: str, window: int | None) -> NDArray[np.bool_]:
        """Return, for each number of blocks, whether a group could reuse a prefix of that length."""
        assert self.block_size is not None
        ends = np.arange(len(there) + 1)
        missing = np.concatenate([[0], np.cumsum(~there)])
        if kind == "mamba":
            return np.concatenate([[True], there])
        if window is None:
            return np.asarray(missing == 0)
        if kind == "chunked_local_attention":
            starts = ends * self.block_size // window * window // self.block_size
        else:
            starts = np.maximum(0, ends * self.block_size - (window - 1)) // self.block_size
        return np.asarray(missing == missing[starts])

    # Changes.

    def apply(self, sequence: int, batch: Batch) -> bool:
        """Apply a batch; return False if it was applied before.

        Raises
        ------
        MissingBatch
            Batches before it are missing: `load` a snapshot, or `skip` them. A batch that begins with AllBlocksCleared
            follows any batch.
        EventFormatError
            With `by_tokens`, an event whose token ids are not integers.
        """
        is_old = sequence <= self.sequence
        if is_old and batch.timestamp <= self._timestamp:
            return False
        is_whole = bool(batch.events) and batch.events[0]["type"] == CLEARED
        if not is_whole and sequence != self.sequence + 1:
            raise MissingBatch(
                f"batch {sequence} follows {sequence - 1}, but the last one applied is {self.sequence}", is_old
            )
        keys = self._keys_of(batch)
        for event, of_blocks in zip(batch.events, keys, strict=True):
            self._apply(event, of_blocks)
        self.sequence, self.rank, self._timestamp = sequence, batch.rank, batch.timestamp
        return True

    def skip(self, sequence: int) -> None:
        """Continue after batch `sequence`, although batches up to it are lost; earlier numbers change nothing.

        The mirror may then hold blocks that the cache has removed, and lack some. A block that it held is one copy from
        then on: its next BlockStored may announce it again after a lost removal.
        """
        sequence = require_int("sequence", sequence, -1, max=None)
        if sequence > self.sequence:
            self._copies.clear()
            self._doubtful = {(*place, block) for place, held in self._held.items() for block in held}
            self.sequence = sequence

    @property
    def timestamp(self) -> float:
        """Timestamp of the last batch, or of the snapshot; minus infinity before both."""
        return self._timestamp

    def reset(self) -> None:
        """Forget everything, as before the first batch."""
        self.load(-1, [])
        self._timestamp = -np.inf

    def load(self, sequence: int, batches: Iterable[Batch]) -> None:
        """Replace the state by a snapshot, which is the state after batch `sequence`."""
        read = [(batch, self._keys_of(batch)) for batch in batches]
        self._clear()
        self._kinds.clear()
        self.block_size = None
        for batch, keys in read:
            self.rank, self._timestamp = batch.rank, batch.timestamp
            for event, of_blocks in zip(batch.events, keys, strict=True):
                self._apply(event, of_blocks)
        self.sequence = sequence

    def _clear(self) -> None:
        self._held.clear()
        self._copies.clear()
        self._doubtful.clear()
        self._sizes.clear()
        if self._paths is not None:
            self._paths.clear()

    def _keys_of(self, batch: Batch) -> list[list[Key | None]]:
        """Return the keys of the blocks of each event; read before anything is applied, as reading may fail."""
        if self._paths is None:
            return [[] for _ in batch.events]
        return [event_keys(event) if event["type"] == STORED else [] for event in batch.events]

    def _apply(self, event: Event, keys: list[Key | None]) -> None:
        if event["type"] == CLEARED:
            self._clear()
            return
        place = event.get("medium") or "GPU", event.get("group_idx") or 0
        self._held.setdefault(place, {})
        if event["type"] == STORED:
            self._note_group(event, place)
            self._store(event, keys, place)
            return
        left = event.get(COPIES_LEFT) or [None] * len(event["block_hashes"])
        for block, copies in zip(event["block_hashes"], left, strict=True):
            self._remove(block, place, copies)

    def _note_group(self, event: Event, place: tuple[str, int]) -> None:
        """Note kind and block size of a group; events of offload connectors may lack the kind and have another size."""
        group, size = place[1], event["block_size"]
        if (kind := event.get("kv_cache_spec_kind")) or group not in self._kinds:
            self._kinds[group] = kind or "full_attention", event.get("kv_cache_spec_sliding_window")
        if not size:
            return
        # LMCache lists the end of a prompt as a block of fewer tokens: the others are as large as the largest.
        self._sizes[place] = max(size, self._sizes.get(place, 0))
        if self._paths is not None:
            device = [each for (medium, _), each in self._sizes.items() if medium == "GPU"]
            self.block_size = min(device or self._sizes.values())
        elif event["token_ids"] or not event["block_hashes"]:
            self.block_size = size

    def _store(self, event: Event, keys: list[Key | None], place: tuple[str, int]) -> None:
        """Add the blocks of an event, which may list neither their token ids nor what is before them."""
        held, parent = self._held[place], event.get("parent_block_hash")
        for i, block in enumerate(event["block_hashes"]):
            if (*place, block) in self._doubtful:
                self._doubtful.remove((*place, block))
            elif block in held:
                self._copies[*place, block] += 1
            elif self._paths is not None:
                self._paths.add(block, keys[i])
            held[block] = parent
            parent = block if event["token_ids"] else None

    def _remove(self, block: BlockHash, place: tuple[str, int], left: int | None) -> None:
        """Remove one copy of a block, or all but the number of copies that the publisher has left."""
        self._doubtful.discard((*place, block))
        if block not in self._held[place]:
            return
        others = self._copies.pop((*place, block), 0)
        copies = others if left is None else left
        if copies > 1:
            self._copies[*place, block] = copies - 1
        elif copies == 0:
            del self._held[place][block]
            if self._paths is not None:
                self._paths.remove(block)


def _is_list_of(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, types) for each in value)
