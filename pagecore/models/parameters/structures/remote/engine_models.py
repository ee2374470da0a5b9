"""Structure of the layers of families that vLLM or SGLang serve, and of two whose attention no spec describes.

Source: as for `pagecore.models.families.remote.engine_models`, and the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import LLAMA, QWEN_3, QWEN_3_MOE
from pagecore.models.parameters.structures.latent_attention import LATENT_ATTENTION
from pagecore.models.parameters.structures.remote.llamas import REMOTE_LLAMAS, weights_of_pass
from pagecore.models.parameters.structures.sliding_windows import SLIDING_WINDOWS

__all__ = ["ENGINE_MODELS"]


def _tables_of_ngrams(fields: Fields) -> Settled:
    """Return the parameters of the tables of n-grams, one for each of their parts, and of their projections."""
    if fields.value("ngram_vocab_size_ratio") is None:
        return {}
    rows = fields.scaled(fields.integer("vocab_size"), "ngram_vocab_size_ratio")
    tables = fields.integer("emb_split_num") * (fields.integer("emb_neighbor_num", min=2) - 1)
    hidden = fields.integer("hidden_size")
    # Table i has 2 * i + 1 rows more than a multiple of the vocabulary.
    return {"first": hidden // tables * (tables * (rows + tables) + tables * hidden)}


def _diffllama(fields: Fields) -> Settled:
    """Four vectors of a head's dim scale the difference of two attentions."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim") if fields.given("head_dim") is not None else fields.integer("hidden_size") // heads
    return {"activation": 4 * dim}


def _doge(fields: Fields) -> Settled:
    """A mask is computed from the values, and both residuals of a layer have a weight for each feature."""
    if fields.flag("is_moe"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('is_moe')}, whose parameters cannot be counted; pass weights= in bytes"
        )
    hidden, heads, kv_heads = (
        fields.integer(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = fields.integer("head_dim") if fields.given("head_dim") is not None else hidden // heads
    mask = kv_heads + kv_heads * (kv_heads * dim + fields.flag("attention_bias"))
    return {"activation": 2 * hidden + mask}


def _domyn_layer(tally: Tally, _fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the norm of keys; that of queries has no weights."""
    tally.norm(specs[0].head_dim)


def _iquest(fields: Fields) -> Settled:
    """Each head of keys has a sink, and a norm follows the MLP of the first layer."""
    sinks = fields.integer("num_key_value_heads") * fields.integer("head_dim") * fields.flag("enable_sink_attention")
    return {"activation": sinks, "first": fields.integer("hidden_size")}


# The encoder of Whisper large-v3, which comes with Kimi-Audio: 128 mel bins, 1,500 positions, 32 layers and a norm.
_WHISPER_LARGE = (
    (3 * 128 + 1) * 1280
    + (3 * 1280 + 1) * 1280
    + 1500 * 1280
    + 32 * (4 * 1280**2 + 3 * 1280 + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280)
    + 2 * 1280
)


def _kimi_audio(fields: Fields) -> Settled:
    """An encoder and an MLP with a norm come before the layers; vLLM loads neither layers nor head of sound."""
    if not fields.flag("use_whisper_feature"):
        return {}
    inputs, hidden = fields.integer("kimia_adaptor_input_dim"), fields.integer("hidden_size")
    return {"first": _WHISPER_LARGE + (inputs + 1) * hidden + (hidden + 1) * hidden + 2 * hidden}


ENGINE_MODELS: Mapping[str, Traits] = {
    "Dream": SLIDING_WINDOWS["qwen2"],
    "diffllama": biased_traits(settle=_diffllama),
    "doge": biased_traits(qk_norm="head", mlp_bias="mlp_bias", settle=_doge, defaults={"is_moe": False}),
    "domyn_edge": Traits(norms=4, add_to_layer=_domyn_layer),
    "interns1_pro_text": QWEN_3_MOE,
    "iquest_q1": Traits(
        norms=3,
        qk_norm="head",
        experts=Experts(width="intermediate_size", rule="step"),
        dense_width="dense_intermediate_size",
        settle=_iquest,
        defaults={"enable_sink_attention": True, "mlp_only_layers": (0,)},
    ),
    "kimi_audio": replace(
        SLIDING_WINDOWS["qwen2"],
        settle=_kimi_audio,
        defaults={
            **SLIDING_WINDOWS["qwen2"].defaults,
            "kimia_adaptor_input_dim": 5120,
            "use_whisper_feature": True,
        },
    ),
    "llada2_moe": REMOTE_LLAMAS["bailing_moe_v2"],
    "longcat_flash_ngram": replace(
        LATENT_ATTENTION["longcat_flash"],
        settle=_tables_of_ngrams,
        defaults={**LATENT_ATTENTION["longcat_flash"].defaults, "ngram_vocab_size_ratio": None},
    ),
    "musespark1x_text": SLIDING_WINDOWS["muse_spark_text"],
    "nanbeige": replace(LLAMA, weights_of_layer=weights_of_pass),
    "qwen3_asr_text": QWEN_3,
    "sdar": QWEN_3,
    "sdar_moe": QWEN_3_MOE,
    "spark2_5": Traits(head_gate="headwise_attn_output_gate", defaults={"headwise_attn_output_gate": True}),
    "teleflm": LLAMA,
}
