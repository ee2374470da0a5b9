"""Parts of models that speak, next to their text model: the codec of sound, tables of codes, and a depth decoder.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.audio.mimi import MIMI, add_mimi
from pagecore.models.parameters.counting.tally import Kind, Split, Tally

__all__ = ["add_speaking_parts", "depth_decoder"]

# Fields with the codec, by the type of the model.
_CODECS: Mapping[str, str] = {
    "csm": "codec_config",
    "kyutai_speech_to_text": "codec_config",
    "moshi": "audio_encoder_config",
}
_CSM_DEPTH: Mapping[str, object] = {
    "model_type": "csm_depth_decoder_model",
    "num_codebooks": 32,
    "backbone_hidden_size": 2048,
    "vocab_size": 2051,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_MOSHI_DEPTH: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "input_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "head_dim": None,
    "audio_vocab_size": 2048,
    "ffn_dim": 5632,
    "num_codebooks": 8,
}


def depth_decoder(whole: Fields) -> Mapping[str, object] | None:
    """Return the config of a decoder of codes that is counted as a model of its own; None without one."""
    if whole.given("model_type") != "csm":
        return None
    given = whole.given("depth_decoder_config")
    return {**_CSM_DEPTH, **(given if isinstance(given, Mapping) else {})}


def add_speaking_parts(tally: Tally, whole: Fields, hidden: int) -> None:
    """Add the codec, the tables of codes and the depth decoder of a model that speaks; nothing for other models.

    `hidden` is the number of features of the text model. A Moshi without `audio_vocab_size` is its text model alone.
    """
    model_type = str(whole.given("model_type"))
    speaks = model_type != "moshi" or whole.given("audio_vocab_size") is not None
    if model_type not in _CODECS or not speaks:
        return
    add_mimi(tally, _part(whole, _CODECS[model_type], MIMI))
    if model_type == "csm" and whole.switch("tie_codebooks_embeddings", True):
        depth = _part(whole, "depth_decoder_config", _CSM_DEPTH)
        rows = depth.integer("num_codebooks") * depth.integer("vocab_size")
        tally.add(-rows * depth.integer("backbone_hidden_size"))  # the table of the text model, counted there
    if model_type == "moshi":
        whole.defaults = {**whole.defaults, "num_codebooks": 8}
        rows = 2 * whole.integer("num_codebooks") * (whole.integer("audio_vocab_size") + 1)
        tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
        _moshi_depth(tally, _part(whole, "depth_decoder_config", _MOSHI_DEPTH))


def _part(whole: Fields, name: str, defaults: Mapping[str, object]) -> Fields:
    part = whole.inner(name) if isinstance(whole.given(name), Mapping) else Fields({}, whole.source, name)
    part.defaults = defaults
    return part


def _moshi_depth(tally: Tally, fields: Fields) -> None:
    """Add a decoder whose matrices are one for each codebook."""
    hidden, codebooks, width = (fields.integer(name) for name in ("hidden_size", "num_codebooks", "ffn_dim"))
    codes, heads, layers = (
        fields.integer(name) for name in ("audio_vocab_size", "num_attention_heads", "num_hidden_layers")
    )
    dim = hidden // heads if fields.value("head_dim") is None else fields.integer("head_dim")
    keys = fields.integer("num_key_value_heads") if fields.given("num_key_value_heads") is not None else heads
    tally.add((fields.integer("vocab_size") + 1) * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.add((codebooks - 1) * (codes + 1) * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.linear(fields.integer("input_size"), hidden, copies=codebooks)
    tally.linear(hidden, heads * dim, split=Split.ATTENTION, copies=2 * layers * codebooks)
    tally.linear(hidden, keys * dim, split=Split.KEY_VALUE, copies=2 * layers * codebooks)
    tally.linear(hidden, width, copies=layers * codebooks)
    tally.linear(width // 2, hidden, copies=layers * codebooks)
    tally.norm(hidden, copies=2 * layers)
    tally.add(codebooks * codes * hidden, Kind.EMBEDDING, Split.TENSOR)
