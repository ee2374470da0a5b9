"""Decoders with grouped heads whose layers slide by rules of their own, and decoders of Kosmos.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.families import GROUPED, Family
from pagecore.models.fields import Fields
from pagecore.models.layer_rules import all_but_every_sixth_and_the_last, is_last, no_layer
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["RECENT"]


def _slides_in_flint(fields: Fields, layer: int) -> bool:
    """Return True if a layer slides: all but the first two, the last, and one of each four."""
    return layer >= 2 and layer % 4 != 1 and not is_last(fields, layer)


def _all_but_every_fourth_from_the_last(fields: Fields, layer: int) -> bool:
    return (fields.integer("num_hidden_layers") - 1 - layer) % 4 != 0


def _layers_of_all_cycles(fields: Fields) -> int:
    """Return the layers of all passes through the two stacks, each of which stores keys and values of its own.

    transformers writes their number as num_hidden_layers, together with num_layers_per_stack.
    """
    if fields.flag("prefix_lm"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('prefix_lm')}, so prompts attend to later tokens, which is not "
            "supported; set it to false for a model that attends to preceding tokens only"
        )
    cycles = fields.integer("H_cycles", max=LAYERS_MAX) * (fields.integer("L_cycles", max=LAYERS_MAX) + 1)
    if cycles > LAYERS_MAX:
        fields.refuse(f"{fields.describe('H_cycles')} and {fields.describe('L_cycles')}; expected {LAYERS_MAX} passes")
    is_total = fields.value("num_layers_per_stack") is not None
    per_stack = fields.integer(
        "num_layers_per_stack" if is_total else "num_hidden_layers", max=max(1, LAYERS_MAX // cycles)
    )
    if is_total and fields.given("num_hidden_layers") not in (None, cycles * per_stack):
        fields.refuse(
            f"{fields.describe('num_hidden_layers')}; it must be {cycles * per_stack}, num_layers_per_stack times "
            f"{cycles} passes"
        )
    return cycles * per_stack


def _windowed(kv_heads: int, head_dim: int, window: int) -> Mapping[str, object]:
    return {"num_key_value_heads": kv_heads, "head_dim": head_dim, "sliding_window": window, "layer_types": None}


_HRM = {
    "head_dim": 128,
    "H_cycles": 2,
    "L_cycles": 3,
    "num_layers_per_stack": None,
    "prefix_lm": True,
}
_KOSMOS_NAMES = {"num_attention_heads": "attention_heads", "hidden_size": "embed_dim", "num_hidden_layers": "layers"}

RECENT: Mapping[str, Family] = {
    "beam": Family(_windowed(8, 128, 512), all_but_every_sixth_and_the_last),
    "chameleon": Family({**GROUPED, "num_key_value_heads": 32}),
    "cohere_compass_text": Family({**GROUPED, "sliding_window": 4096, "layer_types": None}, no_layer),
    "flint": Family(_windowed(4, 128, 513), _slides_in_flint, has_sinks=True),
    "hrm_text": Family(_HRM, count_layers=_layers_of_all_cycles),
    "kosmos_2_5_text_model": Family({}, aliases=_KOSMOS_NAMES),
    "kosmos_2_text_model": Family({}, aliases=_KOSMOS_NAMES),
    "muse_glimmer_text": Family(_windowed(2, 128, 2048), _all_but_every_fourth_from_the_last),
    "muse_spark_text": Family(_windowed(16, 64, 2048), _all_but_every_fourth_from_the_last),
}
