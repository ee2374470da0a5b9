"""Kinds of the layers of a hybrid model, from its config: attention, a recurrent state, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import FULL, HYBRID, HYBRID_SLIDING, LINEAR, NEITHER, SLIDING
from pagecore.storage.checks import LAYERS_MAX

__all__ = [
    "ATTENTION_OR_STATE",
    "NEMOTRON_KINDS",
    "attending_layers",
    "count_by_kind",
    "every_fourth_or_the_last_attends",
    "every_layer_has_both",
    "every_layer_keeps_a_state",
    "every_nth_attends",
    "kimi_fields",
    "kinds_of_gemma",
    "kinds_of_glm_5_next",
    "kinds_of_granite",
    "kinds_of_kimi",
    "kinds_of_lara",
    "kinds_of_lfm",
    "kinds_of_lfm_3",
    "kinds_of_ling",
    "kinds_of_minimax",
    "kinds_of_nemotron",
    "kinds_of_plamo_2",
    "kinds_of_qwen_4",
    "kinds_of_solar",
    "kinds_of_zamba",
    "kinds_of_zamba_1",
    "kinds_of_zaya",
    "listed_kinds",
    "listed_layers_attend",
    "one_layer_of_a_period_attends",
]

_ATTENTION: Mapping[str, str] = {"full_attention": FULL, "attention": FULL}
_STATES: Mapping[str, str] = {"linear_attention": LINEAR, "mamba": LINEAR}
ATTENTION_OR_STATE: Mapping[str, str] = {**_ATTENTION, **_STATES}
NEMOTRON_KINDS: Mapping[str, str] = {**ATTENTION_OR_STATE, "mlp": NEITHER, "moe": NEITHER}
_LETTERS: Mapping[str, str] = {"M": LINEAR, "*": FULL, "-": NEITHER, "E": NEITHER}


def listed_kinds(fields: Fields, num_layers: int | None, names: Mapping[str, str]) -> list[str] | None:
    """Return the kinds in `layer_types`, whose entries have the given names; None if it is null or missing."""
    listed, name = fields.given("layer_types"), fields.name("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe('layer_types')}; it must be a list with one entry for each layer")
    if num_layers is not None and len(listed) != num_layers:
        fields.refuse(
            f"{name} lists {len(listed)} layers, but {fields.name('num_hidden_layers')} is {num_layers}; they must be "
            "equal"
        )
    for layer, kind in enumerate(listed):
        if not isinstance(kind, str) or kind not in names:
            raise UnsupportedOption(
                f"{fields.source}: {name}[{layer}] is {shown(kind)}, which is not supported; expected "
                f"{' or '.join(map(repr, names))}"
            )
    return [names[kind] for kind in listed]


def every_nth_attends(name: str) -> Callable[[Fields, int], list[str]]:
    """Return a reader of layers that are listed, or of which the last one of each group attends; `name` is the size."""

    def kinds(fields: Fields, num_layers: int) -> list[str]:
        found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
        if found is not None:
            return found
        size = fields.integer(name)
        return [LINEAR if (layer + 1) % size else FULL for layer in range(num_layers)]

    return kinds


def every_fourth_or_the_last_attends(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or every fourth one attends; of fewer than four the last."""
    found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
    if found is not None:
        return found
    return [FULL if layer % 4 == 3 or layer == num_layers - 1 < 3 else LINEAR for layer in range(num_layers)]


def kinds_of_qwen_4(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or every nth attends; those with states of n-grams, numbered from 1, do not attend."""
    found = listed_kinds(fields, num_layers, {**ATTENTION_OR_STATE, "indexed_attention": FULL})
    kinds = found or every_nth_attends("full_attention_interval")(fields, num_layers)
    with_ngrams = [] if fields.value("ple_layer_ids") is None else _numbers(fields, "ple_layer_ids")
    if not all(1 <= number <= num_layers and kinds[number - 1] == LINEAR for number in with_ngrams):
        fields.refuse(
            f"{fields.describe('ple_layer_ids')}; it must number layers from 1 that keep a state, of {num_layers}"
        )
    return kinds


def kinds_of_glm_5_next(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or every fourth attends."""
    found = listed_kinds(fields, num_layers, {**ATTENTION_OR_STATE, "indexed_attention": FULL})
    return found or [FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers)]


def kinds_of_zaya(fields: Fields, num_layers: int) -> list[str]:
    """Every layer attends and keeps a state; listed layers may have a window."""
    found = listed_kinds(fields, num_layers, {HYBRID: HYBRID, HYBRID_SLIDING: HYBRID})
    return found or [HYBRID] * num_layers


def kinds_of_kimi(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed in `layer_types`, or numbered from 1 in `linear_attn_config`."""
    found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
    if found is not None:
        return found
    inner = kimi_fields(fields)
    if inner is None or (inner.given("full_attn_layers") is None and inner.given("kda_layers") is None):
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    full, linear = ([number - 1 for number in _numbers(inner, name)] for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(num_layers)):
        inner.refuse(
            f"{inner.name('full_attn_layers')} and {inner.name('kda_layers')} must list each of the layers 1 to "
            f"{num_layers}, {fields.name('num_hidden_layers')}, once"
        )
    return [FULL if layer in set(full) else LINEAR for layer in range(num_layers)]


def kinds_of_nemotron(fields: Fields, num_layers: int | None = None) -> list[str]:
    """Layers are listed, or spelled in `hybrid_override_pattern`: M a state, * attention, - and E neither."""
    found = listed_kinds(fields, num_layers, NEMOTRON_KINDS)
    if found is not None:
        return found
    pattern = fields.given("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= _LETTERS.keys():
        fields.refuse(f"{fields.describe('hybrid_override_pattern')}; it must spell each layer as M, *, - or E")
    return [_LETTERS[letter] for letter in pattern]


def count_by_kind(fields: Fields) -> int:
    """Return the number of layers that are listed; `num_hidden_layers` may be missing, or must equal it."""
    count = len(kinds_of_nemotron(fields))
    if not 1 <= count <= LAYERS_MAX:
        fields.refuse(f"{fields.name('layer_types')} lists {count} layers; expected 1 to {LAYERS_MAX}")
    if fields.given("num_hidden_layers") not in (None, count):
        fields.refuse(f"{fields.describe('num_hidden_layers')}, but {count} layers are listed; they must be equal")
    return count


def kinds_of_granite(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or all keep a state."""
    return listed_kinds(fields, num_layers, ATTENTION_OR_STATE) or [LINEAR] * num_layers


def kinds_of_gemma(fields: Fields, num_layers: int) -> list[str]:
    """Kinds repeat in the order of `block_types`."""
    listed, names = fields.value("block_types"), {"recurrent": LINEAR, "attention": FULL}
    if not listed or any(kind not in names for kind in listed):
        fields.refuse(f"{fields.describe('block_types')}; it must list 'recurrent' and 'attention'")
    return [names[listed[layer % len(listed)]] for layer in range(num_layers)]


def kinds_of_minimax(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed by name, or in `attn_type_list` as 1 for attention; else even ones attend."""
    found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
    if found is not None:
        return found
    if fields.given("attn_type_list") is None:
        return [LINEAR if layer % 2 else FULL for layer in range(num_layers)]
    listed = _numbers(fields, "attn_type_list")
    if len(listed) != num_layers or not set(listed) <= {0, 1}:
        fields.refuse(f"{fields.describe('attn_type_list')}; it must list 0 or 1 for each of the {num_layers} layers")
    return [FULL if kind else LINEAR for kind in listed]


def every_layer_has_both(_fields: Fields, num_layers: int) -> list[str]:
    """Attention and Mamba run side by side in every layer."""
    return [HYBRID] * num_layers


def every_layer_keeps_a_state(_fields: Fields, num_layers: int) -> list[str]:
    """No layer attends."""
    return [LINEAR] * num_layers


def one_layer_of_a_period_attends(fields: Fields, num_layers: int) -> list[str]:
    """One layer of each `attn_layer_period` layers attends, at `attn_layer_offset`."""
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", min=0)
    if offset >= period:
        fields.refuse(f"{fields.describe('attn_layer_offset')}; it must be below attn_layer_period, {period}")
    return [FULL if layer % period == offset else LINEAR for layer in range(num_layers)]


def listed_layers_attend(fields: Fields, num_layers: int) -> list[str]:
    """Layers in `attn_layer_indices` attend."""
    return attending_layers(fields, "attn_layer_indices", num_layers, ())


def kinds_of_zamba(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed; "hybrid" is a shared attention followed by Mamba-2."""
    found = listed_kinds(fields, num_layers, {**_STATES, "hybrid": HYBRID})
    if found is None:
        fields.refuse(f"{fields.name('layer_types')} is missing; add the kind of each layer, 'mamba' or 'hybrid'")
    return found


def kinds_of_zamba_1(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed; or the third, and then one of each `attn_layer_period` layers, has both kinds."""
    found = listed_kinds(fields, num_layers, {**_STATES, "hybrid": HYBRID})
    if found is not None:
        return found
    period = one_layer_of_a_period_attends(fields, num_layers)
    both = {2} | {layer + 3 for layer, kind in enumerate(period) if kind == FULL}
    return [HYBRID if layer in both else LINEAR for layer in range(num_layers)]


def kinds_of_lfm(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed in `layer_types`, or those that attend in `full_attn_idxs`."""
    found = listed_kinds(fields, num_layers, {**_ATTENTION, "conv": LINEAR})
    return found or attending_layers(fields, "full_attn_idxs", num_layers, range(num_layers))


def kinds_of_lfm_3(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or even ones attend, except the first."""
    found = listed_kinds(fields, num_layers, {**_ATTENTION, SLIDING: FULL, "conv": LINEAR})
    return found or [FULL if layer and layer % 2 == 0 else LINEAR for layer in range(num_layers)]


def kinds_of_lara(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or the first and the third of each five keep a state."""
    found = listed_kinds(fields, num_layers, {**ATTENTION_OR_STATE, SLIDING: FULL})
    return found or [LINEAR if layer % 5 in (0, 2) else FULL for layer in range(num_layers)]


def kinds_of_ling(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed, or the last of each group attends; a list of group sizes has 1 for a layer with a state."""
    sizes = fields.given("layer_group_size")
    if fields.given("layer_types") is not None or not isinstance(sizes, list | tuple):
        return every_nth_attends("layer_group_size")(fields, num_layers)
    if len(_numbers(fields, "layer_group_size")) != num_layers:
        fields.refuse(f"{fields.describe('layer_group_size')}; it must be a number, or list one for each layer")
    return [LINEAR if size == 1 else FULL for size in sizes]


def kinds_of_plamo_2(fields: Fields, num_layers: int) -> list[str]:
    """One layer in the middle of each `mamba_step` layers attends; without such a layer the last."""
    if not fields.flag("mamba_enabled"):
        return [FULL] * num_layers
    step = fields.integer("mamba_step", min=2)
    if num_layers <= step // 2:
        return [LINEAR] * (num_layers - 1) + [FULL]
    return [FULL if layer % step == step // 2 else LINEAR for layer in range(num_layers)]


def kinds_of_solar(fields: Fields, num_layers: int) -> list[str]:
    """Layers are listed by name, or those that attend by number; else one attends before `gqa_interval` others."""
    found = listed_kinds(fields, num_layers, ATTENTION_OR_STATE)
    if found is not None:
        return found
    if fields.given("gqa_layers") is not None:
        return attending_layers(fields, "gqa_layers", num_layers, ())
    period = fields.integer("gqa_interval") + 1
    return [LINEAR if layer % period else FULL for layer in range(num_layers)]


def _numbers(fields: Fields, name: str) -> list[int]:
    """Return a field that must be a list of integers."""
    given = fields.given(name)
    if not isinstance(given, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in given):
        fields.refuse(f"{fields.describe(name)}; it must be a list of integers")
    return list(given)


def attending_layers(fields: Fields, name: str, num_layers: int, default: Sequence[int]) -> list[str]:
    """Return the kinds of layers of which those attend that a field numbers, or `default` without it."""
    full = default if fields.given(name) is None else _numbers(fields, name)
    if not all(0 <= layer < num_layers for layer in full):
        fields.refuse(
            f"{fields.describe(name)}; layers are numbered from 0, and there are {num_layers} (num_hidden_layers)"
        )
    return [FULL if layer in full else LINEAR for layer in range(num_layers)]


def kimi_fields(fields: Fields) -> Fields | None:
    """Return the fields of `linear_attn_config`; None if it is null or missing."""
    given = fields.given("linear_attn_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        fields.refuse(f"{fields.describe('linear_attn_config')}; it must be an object")
    return Fields(given, fields.source, fields.name("linear_attn_config"))
