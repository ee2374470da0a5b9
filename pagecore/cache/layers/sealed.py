"""Layers with sealed blocks: their planes as arrays of `seal_kv`, and their operations.

    tokens of a sequence   0 .................. 95 | 96 ............. 250      residual 128, blocks of 32
                           sealed_* of its group   | key and value of the tail
    block tables           9  3  7  5 ...          | 0  0  0  4 ...

Both groups have a block for each unsealed block of tokens: that of the sealed group is filled when a commit seals it,
and the one of the tail is released then.
"""

from __future__ import annotations

from typing import Any

from pagecore.cache.layers.inputs import BatchGroup, StepInputs
from pagecore.cache.layers.operations import AttentionOps
from pagecore.cache.layers.selection import num_listed
from pagecore.errors import UnsupportedOption
from pagecore.ops import SealedBlocks
from pagecore.storage import AttentionSpec, KVPool
from pagecore.storage.specs.sealing import WORD_BITS


class SealedOps(AttentionOps):
    """Operations of an AttentionSpec with a sealed format: it writes to the tail, and attends to both groups."""

    def __init__(self, spec: AttentionSpec, device: str) -> None:
        super().__init__(spec.with_format(None), device)
        self._whole = spec

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Call `paged_attention` with the sealed blocks; `pool` has the newest tokens."""
        if "sealed" in options:
            raise UnsupportedOption("sealed is given, but the cache passes its own sealed blocks; leave it out")
        sealed = group.sealed
        assert sealed is not None
        assert sealed.pool is not None
        lens, blocks = sealed.lens, blocks_of(sealed.pool, index, self._whole)
        listed = num_listed(options, batch.num_sequences, lens.shape[0])
        if listed < lens.shape[0]:
            lens = lens[:listed]
        given = {**options, "sealed": blocks._replace(block_table=sealed.block_table, lens=lens)}
        return super().attend(pool, index, query, batch, group, given)


def blocks_of(pool: KVPool, index: int, spec: AttentionSpec) -> SealedBlocks:
    """Return the planes of layer `index` of a pool of sealed blocks, without a block table; they alias the pool."""
    sealing = spec.sealing
    assert sealing is not None
    assert spec.v_head_dim is not None
    size, groups = sealing.block_size, spec.v_head_dim // sealing.group_size
    words = spec.v_head_dim * sealing.value_bits // WORD_BITS
    rows = size * sealing.key_bits // WORD_BITS
    return SealedBlocks(
        key=pool.divided("sealed_key", (rows, spec.head_dim), index),
        value=pool.divided("sealed_value", (size, words), index, by_token=True),
        key_scale=pool.divided("sealed_key_scale", (size // sealing.group_size, 2, spec.head_dim), index),
        value_scale=pool.divided("sealed_value_scale", (size, groups, 2), index, by_token=True),
    )
