"""Encoders of Nemotron 3.5 Transcribe: of speech, of speakers, and of the times of words.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_nemotron_transcribe"]

_SPEECH: Mapping[str, object] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 10,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "num_mel_bins": 128,
    "subsampling_factor": 8,
}
_SPEAKERS: Mapping[str, object] = {
    **_SPEECH,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 31,
}
_HEAD: Mapping[str, object] = {
    "audio_hidden_size": 512,
    "hidden_size": 192,
    "num_speakers": 8,
    "subsampling_factor": 8,
}
_TIMES: Mapping[str, object] = {
    **_SPEECH,
    "intermediate_size": 640,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "upsampling_factor": 2,
    "vocab_size": 23863,
}


def add_nemotron_transcribe(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add the three encoders, and the layer that projects speech to the features of the text model."""
    speech = _inner(fields, "asr_config", _SPEECH)
    hidden = _add_layers(tally, speech, has_qk_norm=True)
    _add_stacking(tally, speech)
    speakers = _inner(fields, "diarization_config", {})
    heard = _inner(speakers, "audio_config", _SPEAKERS)
    features = _add_layers(tally, heard, has_qk_norm=False)
    _add_stacking(tally, heard)
    encoder_add(tally, features)  # the embedding of silence
    count = _add_speakers(tally, _inner(speakers, "head_config", _HEAD))
    encoder_add(tally, 2 * hidden + 2 * count)
    encoder_linear(tally, hidden, text, bias=True)
    times = _inner(whole, "word_timestamp_config", _TIMES)
    timed = _add_layers(tally, times, has_qk_norm=True)
    encoder_linear(tally, timed, timed * times.integer("upsampling_factor"))
    encoder_add(tally, timed)
    encoder_linear(tally, timed, times.integer("vocab_size"), bias=True)


def _inner(fields: Fields, name: str, defaults: Mapping[str, object]) -> Fields:
    part = fields.inner(name) if fields.has_object(name) else Fields({}, fields.source)
    part.defaults = defaults
    return part


def _add_layers(tally: Tally, fields: Fields, *, has_qk_norm: bool) -> int:
    """Add the layers of an encoder and the norms around them; return its features."""
    hidden, width, heads = map(fields.integer, ("hidden_size", "intermediate_size", "num_attention_heads"))
    layers, dim = fields.integer("num_hidden_layers"), hidden // heads
    groups = heads if fields.value("num_key_value_heads") is None else fields.integer("num_key_value_heads")
    encoder_linear(tally, hidden, heads * dim, copies=2 * layers)
    encoder_linear(tally, hidden, groups * dim, copies=layers)
    encoder_linear(tally, heads * dim, hidden, bias=True, copies=layers)
    encoder_linear(tally, hidden, width, bias=True, copies=layers)
    encoder_linear(tally, width, hidden, bias=True, copies=layers)
    encoder_add(tally, 4 * (layers + 1) * hidden + 4 * layers * dim * has_qk_norm)
    return hidden


def _add_stacking(tally: Tally, fields: Fields) -> None:
    """Add the projection of stacked frames of the spectrogram."""
    stacked = fields.integer("subsampling_factor") * fields.integer("num_mel_bins")
    encoder_linear(tally, stacked, fields.integer("hidden_size"))


def _add_speakers(tally: Tally, head: Fields) -> int:
    """Add the classifier of speakers, at the rate of the spectrogram; return their number."""
    hidden, speakers = head.integer("hidden_size"), head.integer("num_speakers")
    encoder_linear(tally, head.integer("audio_hidden_size"), hidden, bias=True)
    encoder_linear(tally, 3 * hidden, hidden * head.integer("subsampling_factor"), bias=True)
    encoder_linear(tally, hidden, hidden, bias=True)
    encoder_linear(tally, hidden, speakers, bias=True)
    return speakers
