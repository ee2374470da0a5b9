"""Parameters of drafts of the EAGLE kind, which read the hidden states of the model that they draft for.

Source: the drafts that vLLM and SGLang build. The embedding is that of the model, if both have the same hidden size.
The head of an EAGLE-1 is that of the model, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.attention import add_attention
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.structures.common_traits import LLAMA
from pagecore.models.specs import read_model_config
from pagecore.storage import AttentionSpec

__all__ = ["add_eagle", "eagle_version"]


def eagle_version(whole: Fields) -> int:
    """Return 1 or 3 for the config of an EAGLE draft, and 0 for another model.

    Configs of EAGLE-1 with the architecture of a whole model cannot be distinguished from such a model.
    """
    listed = whole.given("architectures")
    names = [each.lower() for each in listed if isinstance(each, str)] if isinstance(listed, list | tuple) else []
    names = [name for name in names if "causallm" in name and "eagle" in name]
    has_head = whole.given("draft_vocab_size") is not None or whole.given("speculators_model_type") == "eagle3"
    if has_head or any("eagle3" in name for name in names):
        return 3
    return 1 if names or whole.given("speculators_model_type") == "eagle" else 0


def add_eagle(tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str, version: int) -> int:
    """Add a draft; return its number of key-value heads.

    Raises
    ------
    UnsupportedOption
        Its layers are not those of a Llama.
    """
    specs = read_model_config(config, dtype="bfloat16", format=None).layers
    layers = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if len(layers) != len(specs) or whole.given("speculators_model_type") not in (None, "eagle3"):
        raise UnsupportedOption(
            f"{whole.source}: an EAGLE draft of {model_type}, whose parameters cannot be counted; expected layers of a "
            "Llama: pass weights= in bytes"
        )
    fields.defaults = {**fields.defaults, "attention_bias": False, "mlp_bias": False}
    hidden, target = fields.integer("hidden_size"), _size(whole, "target_hidden_size")
    for number, spec in enumerate(layers):
        tally.module = f"model.layers.{number}.self_attn"
        add_attention(tally, fields, LLAMA, spec, 2 * hidden if version == 3 and not number else hidden)
        tally.module = f"model.layers.{number}.mlp"
        add_mlp(tally, fields, LLAMA, fields.integer("intermediate_size"))
    tally.module = "model"
    if version == 1:  # no norm precedes the first layer or follows the last one
        tally.norm(hidden, copies=2 * len(layers) - 1)
        tally.linear(2 * hidden, hidden, split=Split.COPY, name="fc")
        return max(spec.num_kv_heads for spec in layers)
    tally.norm(hidden, copies=3 * len(layers) + 1)
    options = whole.given("eagle_config")
    if not isinstance(options, Mapping) or options.get("use_aux_hidden_state") is not False:
        inputs = 3 * (target or hidden)
        tally.linear(inputs, hidden, split=Split.COPY, name="fc")
        tally.norm(inputs, copies=whole.switch("norm_before_fc", False))
    rows = _size(whole, "draft_vocab_size") or fields.integer("vocab_size")
    tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.head += rows * hidden
    if target and target != hidden:
        tally.add(fields.integer("vocab_size") * hidden, Kind.EMBEDDING, Split.TENSOR)
    return max(spec.num_kv_heads for spec in layers)


def _size(whole: Fields, name: str) -> int:
    """Return a size; 0 if it is null or missing."""
    return 0 if whole.given(name) is None else whole.integer(name)
