"""SealedBlocks: the older tokens of sequences, as arguments of attention."""

from __future__ import annotations

from typing import Any, NamedTuple


class SealedBlocks(NamedTuple):
    """Codes and scales of sealed blocks, with their block table.

    `seal_kv` fills the first four arrays; `paged_attention` reads all. Codes of 2 bits are the format "kivi2", those of
    4 bits "kivi4" (KIVI; see `seal_kv`). `bits` below is 2 or 4, independently for keys and values. Groups divide the
    block size for keys, and the head dim, in multiples of 16, for values.

    Attributes
    ----------
    key : array, int32 [num_blocks, Hkv, block_size * bits / 32, D]
        Words of codes of consecutive tokens, the first in the lowest bits.
    value : array, int32 [num_blocks, block_size, Hkv, Dv * bits / 32]
        Words of codes of consecutive channels.
    key_scale : array, [num_blocks, Hkv, groups, 2, D]
        float32, float16 or bfloat16: the scale of each group of tokens, then its least number.
    value_scale : array, [num_blocks, block_size, Hkv, groups, 2]
        float32, float16 or bfloat16: the scale of each group of channels, then its least number.
    block_table : integers, [num_rows, max_blocks]
        Sealed blocks of each sequence in the order of its tokens. Row i belongs to row i of the `block_table` of
        `paged_attention`; `rows` picks rows of both.
    lens : integers, [B]
        Tokens of each sequence in sealed blocks, a multiple of the block size.
    """

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    block_table: Any = None
    lens: Any = None
