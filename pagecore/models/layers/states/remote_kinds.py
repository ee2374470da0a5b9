"""Kinds of the layers of hybrid models whose code is not in transformers.

Source: the models of vLLM and SGLang, and the modeling files of nvidia/Jet-Nemotron-2B and openbmb/MiniCPM-SALA.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import FULL, LINEAR
from pagecore.models.layers.states.kinds import ATTENTION_OR_STATE, NEMOTRON_KINDS, attending_layers, listed_kinds
from pagecore.storage.checks import LAYERS_MAX

__all__ = [
    "count_blocks",
    "kinds_of_gigachat",
    "kinds_of_jet",
    "kinds_of_minicpm",
    "kinds_of_puzzle",
    "listed_layers",
    "windows_of_jet",
]

_JET: Mapping[str, str] = {"attn": FULL, "swa": FULL, "jet": LINEAR}
_MIXERS: Mapping[str, str] = {
    **dict.fromkeys(("attention", "attn", "minicpm", "minicpm4", "standard"), FULL),
    **dict.fromkeys(("lightning", "lightning-attn", "lightning_attn"), LINEAR),
}


def listed_layers(fields: Fields, num_layers: int, names: Mapping[str, str] = ATTENTION_OR_STATE) -> list[str]:
    """Layers are listed, and have no default."""
    found = listed_kinds(fields, num_layers, names)
    if found is None:
        fields.refuse(f"{fields.name('layer_types')} is missing; add the kind of each of the {num_layers} layers")
    return found


def kinds_of_jet(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed: "jet" keeps a state, "attn" attends, and "swa" attends to a window."""
    return listed_layers(fields, num_layers, _JET)


def windows_of_jet(fields: Fields, num_layers: int) -> list[int | None]:
    """Return the window of each layer that is listed as "swa"."""
    kinds_of_jet(fields, num_layers)
    listed = fields.given("layer_types")
    window = fields.integer("efficient_attention_config.swa.window_size") if "swa" in listed else None
    return [window if each == "swa" else None for each in listed]


def kinds_of_gigachat(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or those in `full_attention_layers` attend."""
    found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
    return found or attending_layers(fields, "full_attention_layers", num_layers, ())


def kinds_of_minicpm(fields: Fields, num_layers: int) -> list[str]:
    """Kinds repeat in the order of `mixer_types`; without it all layers attend."""
    listed = fields.given("mixer_types") or ["minicpm4"]
    if not isinstance(listed, list | tuple) or not 1 <= len(listed) <= num_layers:
        fields.refuse(f"{fields.describe('mixer_types')}; it must list kinds of at most {num_layers} layers")
    for number, kind in enumerate(listed):
        if not isinstance(kind, str) or kind not in _MIXERS:
            expected = " or ".join(map(repr, _MIXERS))
            fields.refuse(f"{fields.name('mixer_types')}[{number}] is {shown(kind)}; expected {expected}")
    return [_MIXERS[listed[layer % len(listed)]] for layer in range(num_layers)]


def kinds_of_puzzle(fields: Fields, num_layers: int | None = None) -> list[str]:
    """Each entry of `block_configs` names the kind of a layer; it may have experts of its own, no other sizes."""
    blocks = fields.value("block_configs")
    if not isinstance(blocks, list | tuple) or not blocks or len(blocks) != (num_layers or len(blocks)):
        fields.refuse(f"{fields.describe('block_configs')}; it must list an object for each layer")
    kinds = []
    for layer, block in enumerate(blocks):
        given = block if isinstance(block, Mapping) else {}
        kind = given.get("block_type")
        if not isinstance(kind, str) or kind not in NEMOTRON_KINDS:
            expected = " or ".join(map(repr, NEMOTRON_KINDS))
            fields.refuse(f"{fields.name('block_configs')}[{layer}].block_type is {shown(kind)}; expected {expected}")
        own = next((name for name in given if name in fields.defaults or name == "num_attention_heads"), None)
        if own is not None and given[own] != fields.value(own):
            fields.refuse(
                f"{fields.name('block_configs')}[{layer}].{own} is {shown(given[own])}; it must be "
                f"{shown(fields.value(own))}, that of all layers"
            )
        kinds.append(NEMOTRON_KINDS[kind])
    return kinds


def count_blocks(fields: Fields) -> int:
    """Return the number of entries of `block_configs`, which `num_hidden_layers` must equal if it is given."""
    count = len(kinds_of_puzzle(fields))
    if count > LAYERS_MAX or fields.given("num_hidden_layers") not in (None, count):
        fields.refuse(
            f"{fields.name('block_configs')} lists {count} layers; expected those of num_hidden_layers, "
            f"{shown(fields.given('num_hidden_layers'))}, and at most {LAYERS_MAX}"
        )
    return count
