"""Layers for the prediction of further tokens (multi-token prediction, MTP), which serve as a draft.

transformers does not build these layers. Sources: the checkpoints of DeepSeek-V3 and V4, GLM-4.5, Qwen3-Next,
ERNIE 4.5, MiMo and Ling 2, Nemotron-H in transformers 5, and the drafts that vLLM and SGLang build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.layer_types import FULL
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Experts
from pagecore.storage import AttentionSpec, LatentSpec, RowSpec

__all__ = ["add_mtp_ends", "count_mtp_layers", "mtp_experts", "mtp_parts", "mtp_spec"]


@dataclass(frozen=True)
class _Draft:
    """Structure of a family's draft.

    Parameters
    ----------
    field : str
        Field with the number of layers.
    default : int
        Number of layers of a file without the field.
    norms : int
        Norms of the embedding, of the hidden states and, if it is not that of the model, of the output.
    is_dense : bool
        The layer has an MLP where the model has experts.
    has_window : bool
        The layer has a window as others of the model, unless `mtp_layer_types`, or `layer_types` after the layers of
        the model, says that it attends to all.
    has_head : bool
        The layer has an output head of its own.
    has_streams : bool
        Weights join the streams of the hidden state after the layer.
    is_block : bool
        The layers draft a block of tokens together (DSpark): the first one reads hidden states of several layers, and
        the last one has a head for transitions between tokens, and estimates acceptance.
    """

    field: str = "num_nextn_predict_layers"
    default: int = 0
    norms: int = 3
    is_dense: bool = False
    has_window: bool = False
    has_head: bool = False
    has_streams: bool = False
    is_block: bool = False


_NEXTN = _Draft()
_DRAFTS: Mapping[str, _Draft] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _NEXTN),
    **dict.fromkeys(("bailing_moe_v2", "glm_ocr_text", "hy_v3", "mimo", "pangu_ultra_moe"), _NEXTN),
    "deepseek_v4": _Draft(default=1, has_streams=True),
    "deepseek_v41_text": _Draft(is_block=True),
    # Every checkpoint of Qwen3-Next has one such layer; its config.json does not count it.
    "qwen3_next": _Draft(default=1),
    "qwen3_5_text": _Draft("mtp_num_hidden_layers"),
    "qwen3_5_moe_text": _Draft("mtp_num_hidden_layers"),
    "ernie4_5_moe": _Draft(norms=2, is_dense=True),
    "exaone_moe": _Draft(is_dense=True, has_window=True),
    # Their files do not count them, and engines load one.
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), _Draft(default=1, is_dense=True, has_window=True)),
    "nemotron_h": _NEXTN,
    "step3p5": _Draft(is_dense=True, has_window=True, has_head=True),
}
# Parts of a layer of Nemotron-H: as a list names them, and the characters of a pattern.
_PARTS = {"*": FULL, "E": "moe", "attention": FULL, FULL: FULL, "moe": "moe"}


def count_mtp_layers(fields: Fields, model_type: str) -> int:
    """Return the number of such layers in the checkpoint of a model.

    Raises
    ------
    ConfigError
        The field is not a number of layers.
    UnsupportedOption
        The family has none, or its config counts none.
    """
    draft = _DRAFTS.get(model_type)
    if draft is None:
        raise UnsupportedOption(
            f"{fields.source}: layers for the prediction of further tokens are not known of {model_type}, only of "
            f"{', '.join(_DRAFTS)}; pass draft_model= instead"
        )
    given = fields.given(draft.field)
    count = draft.default if given is None else fields.integer(draft.field, min=0)
    if not count:
        shown = f"{fields.name(draft.field)} is missing" if given is None else fields.describe(draft.field)
        raise UnsupportedOption(f"{shown}: the checkpoint has no layers that predict further tokens; use another draft")
    return count


def mtp_parts(fields: Fields, model_type: str) -> list[str]:
    """Return what such a layer consists of: "full_attention" with an MLP, or in Nemotron-H each on its own.

    Raises
    ------
    ConfigError
        A part of a layer of Nemotron-H neither attends nor has experts.
    """
    if model_type != "nemotron_h":
        return [FULL]
    given = [name for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern") if fields.given(name)]
    if not given:
        return [FULL, "moe"]
    listed = fields.value(given[0])
    if not isinstance(listed, list | tuple | str) or not {*map(str, listed)} <= {*_PARTS}:
        fields.refuse(f"{fields.describe(given[0])}; its parts must be {', '.join(_PARTS)}")
    return [_PARTS[part] for part in listed]


def mtp_spec(layers: Sequence[object], fields: Fields, model_type: str) -> AttentionSpec | LatentSpec | RowSpec:
    """Return the spec of such a layer: that of the last layer with full attention, with an index if any has one.

    In a model whose layers all have windows (DeepSeek-V4), and for drafts with a window, it is that of a window.
    """
    attending: list[AttentionSpec | LatentSpec | RowSpec] = [
        each for each in layers if isinstance(each, AttentionSpec | LatentSpec)
    ]
    if not attending:  # latents in rows of bytes
        return next(each for each in layers if isinstance(each, RowSpec) and each.window is not None)
    full = [each for each in attending if getattr(each, "window", None) is None]
    if _DRAFTS[model_type].has_window and FULL not in _listed_types(fields, len(layers)):
        full = [each for each in attending if each not in full] or full
    indexed = [each for each in full if getattr(each, "index_dim", None) is not None]
    return (indexed or full or attending)[-1]


def _listed_types(fields: Fields, num_layers: int) -> Sequence[object]:
    """Return the types of such layers, if a file lists them."""
    own, listed = fields.given("mtp_layer_types"), fields.given("layer_types")
    if isinstance(own, list | tuple):
        return own
    return listed[num_layers:] if isinstance(listed, list | tuple) else ()


def mtp_experts(fields: Fields, model_type: str, experts: Experts | None) -> Experts | None:
    """Return the experts of such a layer from those of the model; None for an MLP."""
    draft = _DRAFTS[model_type]
    if experts is None or draft.is_dense:
        return None
    own = "dspark_n_routed_experts"
    return replace(experts, count=own) if draft.is_block and fields.given(own) else experts


def add_mtp_ends(tally: Tally, fields: Fields, model_type: str, number: int, count: int) -> None:
    """Add what layer `number` of `count` has in addition; embedding, and most heads, are those of the model."""
    hidden, draft = fields.integer("hidden_size"), _DRAFTS[model_type]
    if draft.is_block:
        _add_ends_of_block(tally, fields, hidden, is_first=number == 0, is_last=number == count - 1)
        return
    tally.norm(hidden, copies=draft.norms)
    tally.linear(2 * hidden, hidden, split=Split.COPY, kind=Kind.OTHER)
    if draft.has_head:
        rows = fields.integer("vocab_size")
        tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
        tally.head += rows * hidden
    if draft.has_streams:
        streams = fields.integer("hc_mult")
        tally.add(streams * (streams * hidden + 1) + 1)


def _add_ends_of_block(tally: Tally, fields: Fields, hidden: int, *, is_first: bool, is_last: bool) -> None:
    """Add the projection of hidden states to the first layer, and the heads of the last one."""
    if is_first:
        tally.norm(hidden)
        read = len(fields.integers("dspark_target_layer_ids", min=0))
        tally.linear(read * hidden, hidden, split=Split.COPY, name="main_proj")
    if is_last:
        rank = fields.integer("dspark_markov_rank")
        tally.norm(hidden)
        tally.add(2 * fields.integer("vocab_size") * rank + hidden + rank)
