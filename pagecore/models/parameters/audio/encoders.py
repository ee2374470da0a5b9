"""Audio encoders of multimodal models with the layers of Whisper, and their projectors to the text model.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.audio.dasheng import add_dasheng
from pagecore.models.parameters.audio.dots_3 import add_dots_3_audio
from pagecore.models.parameters.audio.formula_encoders import FORMULA_ENCODERS
from pagecore.models.parameters.audio.gemma_4 import add_gemma_3n_audio, add_gemma_4_audio
from pagecore.models.parameters.audio.muse_spark import add_audio_levels
from pagecore.models.parameters.audio.nemotron_transcribe import add_nemotron_transcribe
from pagecore.models.parameters.audio.parakeet import add_sound_of_nemotron
from pagecore.models.parameters.audio.phi_4 import add_phi_4_audio
from pagecore.models.parameters.audio.vibevoice import add_vibevoice, add_vibevoice_encoder
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.radio import WITH_RADIO
from pagecore.storage.checks import ceil_div

__all__ = ["AUDIO_PARTS", "add_audio"]

# Adds a projector from the fields of the model and of its encoder, the encoder's features, and those of the text model.
Projector = Callable[[Tally, Fields, Fields, int, int], None]

# Objects of a config that describe encoders of sound or further models.
AUDIO_PARTS = (
    "audio_config",
    "encoder_config",
    "acoustic_tokenizer_encoder_config",
    "semantic_model_config",
    "semantic_tokenizer_encoder_config",
)
_WHISPER = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
}


def _two_layers(inputs: str = "hidden_size", *, widening: int = 1, bias: bool | str = True) -> Projector:
    """Return a projector of two layers; between them are `widening` times the features of the text model.

    `bias` is a field of the model that is true unless it is given, or the fact itself.
    """

    def add(tally: Tally, whole: Fields, fields: Fields, _hidden: int, text: int) -> None:
        between = widening * text
        has_bias = whole.switch(bias, True) if isinstance(bias, str) else bias
        encoder_linear(tally, fields.integer(inputs), between, bias=has_bias)
        encoder_linear(tally, between, text, bias=has_bias)

    return add


def _one_layer(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, text: int) -> None:
    encoder_linear(tally, hidden, text, bias=True)


def _layer_and_marks(tally: Tally, _whole: Fields, fields: Fields, hidden: int, _text: int) -> None:
    """Add a layer, and the embeddings of the beginning and the end of sound."""
    outputs = fields.integer("output_dim")
    encoder_linear(tally, hidden, outputs, bias=True)
    encoder_add(tally, 2 * outputs)


def _into_output(tally: Tally, _whole: Fields, fields: Fields, hidden: int, _text: int) -> None:
    encoder_linear(tally, hidden, hidden, bias=True)
    encoder_linear(tally, hidden, fields.integer("output_dim"), bias=True)


@dataclass(frozen=True)
class Encoder:
    """Differences of an encoder from that of Whisper.

    Parameters
    ----------
    projector : callable
        Adds what follows the encoder.
    has_positions : bool
        Positions are embedded.
    is_flat : bool
        The first layers are convolutions over time and frequency; else over time alone.
    has_key_bias : bool
        The projection of keys has a bias.
    aliases : mapping
        The encoder's own names of fields.
    """

    projector: Projector
    has_positions: bool = True
    is_flat: bool = False
    has_key_bias: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


_QWEN_3 = Encoder(_into_output, has_positions=False, is_flat=True, has_key_bias=True, aliases=_WHISPER)
_ENCODERS: Mapping[str, Encoder] = {
    "audioflamingo3_encoder": Encoder(_two_layers(bias="projector_bias")),
    "glmasr_encoder": Encoder(_two_layers("intermediate_size", widening=2), has_positions=False),
    "qwen2_5_omni_audio_encoder": Encoder(_layer_and_marks, has_positions=False, aliases=_WHISPER),
    "qwen2_audio_encoder": Encoder(_one_layer, aliases=_WHISPER),
    "qwen3_asr_encoder": _QWEN_3,
    "qwen3_omni_moe_audio_encoder": _QWEN_3,
    "voxtral_encoder": Encoder(_two_layers("intermediate_size", bias=False)),
}


def _project_ultravox(tally: Tally, whole: Fields, hidden: int, text: int) -> None:
    """Add two layers that read stacked features, and the norms before and between or after them."""
    whole.defaults = {**whole.defaults, "hidden_size": 4096, "stack_factor": 8, "projector_act": "swiglu"}
    inputs, width = hidden * whole.integer("stack_factor"), whole.integer("hidden_size")
    between = width // 2 if whole.value("projector_act") == "swiglu" else width
    encoder_linear(tally, inputs, width)
    encoder_linear(tally, between, text)
    encoder_add(tally, inputs + (between if whole.switch("projector_ln_mid", False) else text))


def _add_whisper(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder of a Whisper, and the projector of the model that it is a part of."""
    model_type = whole.given("model_type")
    if model_type not in ("minicpmo", "ultravox") or whole.given("num_projector_layers"):
        raise UnsupportedOption(
            f"{whole.source}: {whole.describe('model_type')}, whose projector of sound is unknown; expected minicpmo, "
            "or ultravox without num_projector_layers: remove audio_config to plan the text model alone"
        )
    fields.aliases, fields.defaults = _WHISPER, _SIZES
    _add_encoder(tally, fields, Encoder(_one_layer))
    hidden = fields.integer("hidden_size")
    if model_type == "ultravox":
        _project_ultravox(tally, whole, hidden, text)
    else:
        encoder_linear(tally, hidden, text, bias=True)
        encoder_linear(tally, text, text, bias=True)


# Encoders with other layers, which add their projector, too, from the fields of the whole model and of the encoder, and
# the features of the text model.
_OTHERS: Mapping[str, Callable[[Tally, Fields, Fields, int], None]] = {
    **FORMULA_ENCODERS,
    "dots3_note_audio_encoder": add_dots_3_audio,
    "gemma3n_audio": add_gemma_3n_audio,
    "gemma4_audio": add_gemma_4_audio,
    "midashenglm_dasheng_encoder": add_dasheng,
    "muse_spark_audio": add_audio_levels,
    "nemotron3_5_transcribe_audio": add_nemotron_transcribe,
    **dict.fromkeys(("parakeet", "parakeet_encoder"), add_sound_of_nemotron),
    "phi4_multimodal_audio": add_phi_4_audio,
    "vibevoice_acoustic_tokenizer": add_vibevoice,
    "vibevoice_acoustic_tokenizer_encoder": add_vibevoice_encoder,
    "whisper": _add_whisper,
}
# Fields and types of encoders whose object is in another field and does not name its type.
_OWN_FIELDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys((*WITH_RADIO, "nemotron_h_omni"), ("sound_config", "parakeet")),
    "midashenglm": ("audio_encoder_config", "midashenglm_dasheng_encoder"),
}
# Sizes that published files leave out.
_SIZES: Mapping[str, object] = {"num_mel_bins": 128, "max_source_positions": 1500, "downsample_hidden_size": 480}


def add_audio(tally: Tally, whole: Fields, text_hidden: int) -> None:
    """Add the audio encoder and its projector to the features of the text model; nothing without an encoder.

    Raises
    ------
    ConfigError
        A size is missing; the message names the field.
    UnsupportedOption
        An encoder of an unknown type.
    """
    own = _OWN_FIELDS.get(str(whole.given("model_type")))
    if own is not None and whole.has_object(own[0]):
        _OTHERS[own[1]](tally, whole, whole.inner(own[0]), text_hidden)
    for name in AUDIO_PARTS:
        if whole.has_object(name):
            fields = whole.inner(name)
            kind = str(fields.given("model_type"))
            if kind in _OTHERS:
                _OTHERS[kind](tally, whole, fields, text_hidden)
                continue
            encoder = _ENCODERS.get(kind)
            if encoder is None:
                raise UnsupportedOption(
                    f"{fields.source}: {fields.describe('model_type')}, an encoder that is unknown; "
                    f"expected one of {', '.join([*_ENCODERS, *_OTHERS])}: remove {name} to plan the text "
                    "model alone"
                )
            fields.aliases, fields.defaults = encoder.aliases, _SIZES
            _add_encoder(tally, fields, encoder)
            encoder.projector(tally, whole, fields, fields.integer("hidden_size"), text_hidden)


def _add_encoder(tally: Tally, fields: Fields, encoder: Encoder) -> None:
    hidden, width = fields.integer("hidden_size"), fields.integer("intermediate_size")
    layers = fields.integer("num_hidden_layers")
    _add_convolutions(tally, fields, hidden, encoder.is_flat)
    if encoder.has_positions:
        encoder_add(tally, fields.integer("max_source_positions") * hidden)
    encoder_linear(tally, hidden, hidden, copies=4 * layers)
    encoder_add(tally, layers * (3 + encoder.has_key_bias) * hidden)
    encoder_linear(tally, hidden, width, bias=True, copies=layers)
    encoder_linear(tally, width, hidden, bias=True, copies=layers)
    encoder_add(tally, 2 * (2 * layers + 1) * hidden)  # norms


def _add_convolutions(tally: Tally, fields: Fields, hidden: int, is_flat: bool) -> None:
    bins = fields.integer("num_mel_bins")
    if not is_flat:
        encoder_linear(tally, 3 * bins, hidden, bias=True)
        encoder_linear(tally, 3 * hidden, hidden, bias=True)
        return
    channels = fields.integer("downsample_hidden_size")
    encoder_linear(tally, 9, channels, bias=True)
    encoder_linear(tally, 9 * channels, channels, bias=True, copies=2)
    encoder_linear(tally, channels * ceil_div(bins, 8), hidden)
