"""Families whose sliding layers have other heads than those that attend to all keys.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.families import Family, Heads
from pagecore.models.fields import Fields

__all__ = ["MIXED"]


def _first_and_every_sixth_attend(_fields: Fields, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def _twice_the_heads(fields: Fields, heads: Heads, slides: bool) -> Heads:
    """Sliding layers have twice the key-value heads, and the only sinks."""
    heads = replace(heads, v_head_dim=fields.integer("v_head_dim"), has_sinks=slides)
    if not slides:
        return heads
    queries = fields.integer("num_attention_heads")
    if queries % (2 * heads.kv_heads):
        fields.refuse(
            f"{fields.describe('num_key_value_heads')}; twice that number, the heads of sliding layers, must divide "
            f"{fields.name('num_attention_heads')}, which is {queries}"
        )
    return replace(heads, kv_heads=2 * heads.kv_heads)


def _preceding_tokens_and_one(fields: Fields) -> int | None:
    """Return `sliding_window`, or one more than `sliding_window_size`, which does not count the token itself."""
    if fields.given("sliding_window_size") is not None:
        return fields.integer("sliding_window_size") + 1
    return None if fields.value("sliding_window") is None else fields.integer("sliding_window")


MIMO_V2_FLASH: Mapping[str, object] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "sliding_window": 129,
    "sliding_window_size": None,
    "layer_types": None,
    # Published files have one, equal to the window; no layer attends in chunks.
    "attention_chunk_size": None,
}

MIXED: Mapping[str, Family] = {
    "mimo_v2_flash": Family(
        MIMO_V2_FLASH,
        _first_and_every_sixth_attend,
        has_sinks=True,
        heads=_twice_the_heads,
        window=_preceding_tokens_and_one,
    ),
}
