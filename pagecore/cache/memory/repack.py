"""Repacking: the kept tokens of a compacted sequence, in new sealed blocks and new blocks of the tail.

    block size 4, kept 0 1 | 4 5 6 7 | 9 12    tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 .. 14     sealed to 12
                                               becomes 0 1 4 5 | 6 7 9 12

Numbers of sealed blocks are restored, tokens that are kept move to their places, and whole blocks are sealed again. A
new block whose tokens are those of one sealed block, in their places, is copied as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, empty, strided
from pagecore.cache.layers.sealed import blocks_of
from pagecore.ops import SealedBlocks, copy_blocks, seal_kv, transfer_blocks, unseal_kv, write_kv
from pagecore.storage import AttentionSpec, KVPool

Ids = NDArray[np.int32]
# Old blocks that are restored at once, unless one new block needs more.
CHUNK = 64


class KeptTokens(NamedTuple):
    """Tokens that a sequence keeps in a tail and its group of sealed blocks.

    Attributes
    ----------
    keep : int32 [n]
        Their positions before.
    sealed_blocks, tail_blocks : int32
        Blocks of the sequence in both groups, before.
    num_sealed_tokens : int
        Tokens in sealed blocks, before.
    first_sealed, first_tail : int
        Index of the first new block in each group; the tokens of blocks before it stay.
    new_sealed_blocks, new_tail_blocks : int32
        New blocks from these indices on.
    """

    keep: Ids
    sealed_blocks: Ids
    tail_blocks: Ids
    num_sealed_tokens: int
    first_sealed: int
    new_sealed_blocks: Ids
    first_tail: int
    new_tail_blocks: Ids


class Chunk(NamedTuple):
    """New blocks that are made together, from old blocks that are restored to numbered places.

    Attributes
    ----------
    restored, copied : int32 [n, 2]
        (sealed block, place) and (block of the tail, place).
    to_tail, to_seal : int64
        Slot of each token of the places: in the tail, and in numbered blocks that are sealed; -1 for others.
    sealed_blocks : int32 [n, 2]
        (numbered block, new sealed block).
    """

    restored: Ids
    copied: Ids
    to_tail: NDArray[np.int64]
    to_seal: NDArray[np.int64]
    sealed_blocks: Ids


def repack(newest: KVPool, target: KVPool, spec: AttentionSpec, kept: KeptTokens, stream: Any) -> None:
    """Fill the new blocks of a tail and of its sealed blocks, in all layers; no other block is written."""
    size = newest.block_size
    moves, chunks = plan_chunks(kept, size)
    if len(moves):
        copy_blocks(target.planes(), moves, independent=True, stream=stream)
    if not chunks:
        return
    places = max(len(chunk.to_tail) for chunk in chunks) // size
    blocks = 1 + max(len(chunk.sealed_blocks) for chunk in chunks)
    key, value = newest.plane("key", 0), newest.plane("value", 0)
    scratch = [_Scratch(plane, places, blocks, stream) for plane in (key, value)]
    for layer in range(newest.num_layers):
        key, value = newest.plane("key", layer), newest.plane("value", layer)
        for chunk in chunks:
            _make(key, value, blocks_of(target, layer, spec), chunk, scratch, stream)


class _Scratch:
    """Memory of keys or of values: tokens of restored blocks, and blocks to seal; the first of each is unused."""

    def __init__(self, plane: Tensor, places: int, blocks: int, stream: Any) -> None:
        _, size, heads, dim = plane.shape
        self.tokens = empty((places * size, heads, dim), plane.dtype, plane.device, stream=stream)
        self.places = strided(self.tokens, (places, size, heads, dim))
        self.blocks = empty((blocks, size, heads, dim), plane.dtype, plane.device, stream=stream)


def _make(key: Tensor, value: Tensor, sealed: SealedBlocks, chunk: Chunk, scratch: list[_Scratch], stream: Any) -> None:
    """Make the new blocks of a chunk in one layer."""
    keys, values = scratch
    if len(chunk.restored):
        unseal_kv(sealed, keys.places, values.places, chunk.restored, stream=stream)
    if len(chunk.copied):
        transfer_blocks([key, value], [keys.places, values.places], chunk.copied, independent=True, stream=stream)
    if (chunk.to_tail >= 0).any():
        write_kv(keys.tokens, values.tokens, key, value, chunk.to_tail, stream=stream)
    if len(chunk.sealed_blocks):
        write_kv(keys.tokens, values.tokens, keys.blocks, values.blocks, chunk.to_seal, stream=stream)
        seal_kv(keys.blocks, values.blocks, sealed, chunk.sealed_blocks, stream=stream)


def plan_chunks(kept: KeptTokens, size: int, most: int = CHUNK) -> tuple[Ids, list[Chunk]]:
    """Return the sealed blocks that are copied as they are, int32 [n, (old, new)], and the chunks of all others."""
    moves = []
    made: list[tuple[int, Ids]] = []
    for index, positions in _new_blocks(kept, size):
        is_whole = len(positions) == size and positions[0] % size == 0 and positions[-1] == positions[0] + size - 1
        if _becomes_sealed(kept, index) and is_whole and positions[-1] < kept.num_sealed_tokens:
            moves.append((kept.sealed_blocks[positions[0] // size], kept.new_sealed_blocks[index - kept.first_sealed]))
        else:
            made.append((index, positions))
    return np.array(moves, np.int32).reshape(-1, 2), [_chunk(kept, size, part) for part in _parts(made, size, most)]


def _new_blocks(kept: KeptTokens, size: int) -> Iterator[tuple[int, Ids]]:
    """Yield the index of each new block and the positions of its tokens."""
    for first, blocks in ((kept.first_sealed, kept.new_sealed_blocks), (kept.first_tail, kept.new_tail_blocks)):
        for index in range(first, first + len(blocks)):
            yield index, kept.keep[index * size : (index + 1) * size]


def _becomes_sealed(kept: KeptTokens, index: int) -> bool:
    return index < kept.first_sealed + len(kept.new_sealed_blocks)


def _parts(made: list[tuple[int, Ids]], size: int, most: int) -> Iterator[list[tuple[int, Ids]]]:
    """Divide new blocks into parts that need up to `most` old blocks; a part of one block may need more."""
    part: list[tuple[int, Ids]] = []
    needed: set[int] = set()
    for entry in made:
        more = set((entry[1] // size).tolist())
        if part and len(needed | more) > most:
            yield part
            part, needed = [], set()
        part.append(entry)
        needed |= more
    if part:
        yield part


def _chunk(kept: KeptTokens, size: int, part: list[tuple[int, Ids]]) -> Chunk:
    old = np.unique(np.concatenate([positions // size for _, positions in part]))
    places = np.stack([old, np.arange(1, len(old) + 1)], axis=1).astype(np.int32)
    is_sealed = old * size < kept.num_sealed_tokens
    restored, copied = places[is_sealed], places[~is_sealed]
    # `take`: where an allocation fails, NumPy 2.4 crashes in indexing by arrays other than int64.
    restored[:, 0], copied[:, 0] = kept.sealed_blocks.take(restored[:, 0]), kept.tail_blocks.take(copied[:, 0])
    to_tail, to_seal = (np.full((len(old) + 1) * size, -1, np.int64) for _ in range(2))
    sealed: list[tuple[int, int]] = []
    for index, positions in part:
        tokens = (np.searchsorted(old, positions // size) + 1) * size + positions % size
        if _becomes_sealed(kept, index):
            sealed.append((len(sealed) + 1, kept.new_sealed_blocks[index - kept.first_sealed]))
            first, slots = len(sealed), to_seal
        else:
            first, slots = int(kept.new_tail_blocks[index - kept.first_tail]), to_tail
        slots[tokens] = first * size + np.arange(len(positions))
    return Chunk(restored, copied, to_tail, to_seal, np.array(sealed, np.int32).reshape(-1, 2))
