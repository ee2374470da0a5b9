"""Parameters of the models of SeamlessM4T that transcribe or translate speech, with the encoder of speech.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.encoders.cross_layers import DecoderStage, add_cross_layers, add_tables

__all__ = ["add_seamless", "add_seamless_v2"]

_DEFAULTS: Mapping[str, object] = {
    "adaptor_kernel_size": 8,
    "add_adapter": True,
    "conv_depthwise_kernel_size": 31,
    "feature_projection_input_dim": 160,
    "left_max_position_embeddings": 64,
    "num_adapter_layers": 1,
    "right_max_position_embeddings": 8,
}
_MATRICES = """
    feature_projection_input_dim * hidden_size
    + speech_encoder_layers * (
        7 * hidden_size ** 2 + 4 * hidden_size * speech_encoder_intermediate_size)
    + 2 * hidden_size * speech_encoder_intermediate_size
    + add_adapter * num_adapter_layers * (
        (4 * adaptor_kernel_size + 4) * hidden_size ** 2
        + 2 * hidden_size * speech_encoder_intermediate_size)"""
_REST = """
    2 * feature_projection_input_dim + 6 * hidden_size + speech_encoder_intermediate_size
    + speech_encoder_layers * (
        (conv_depthwise_kernel_size + 18) * hidden_size + 2 * speech_encoder_intermediate_size)
    + add_adapter * num_adapter_layers * (15 * hidden_size + speech_encoder_intermediate_size)"""
_POSITIONS = "speech_encoder_layers * hidden_size ** 2", "speech_encoder_layers * 2 * hidden_size"
_DISTANCES = (
    "0",
    """speech_encoder_layers * (left_max_position_embeddings + right_max_position_embeddings + 1)
    * (hidden_size // speech_encoder_attention_heads)""",
)


def _seamless(kind: str, positions: tuple[str, str]) -> Callable[[Tally, Fields, DecoderStage], None]:
    """Return a function that adds a model, or a stage of its decoder.

    `positions` are the formulas of the positions of speech if `position_embeddings_type` is `kind`; others have no
    parameters.
    """

    def add(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
        fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
        fields.defaults = {**fields.defaults, **_DEFAULTS}
        width = fields.integer("decoder_ffn_dim")
        add_cross_layers(tally, decoder, hidden, bias=True, output_bias=True)
        tally.linear(hidden, width, bias=True, copies=layers)
        tally.linear(width, hidden, bias=True, copies=layers)
        tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_last)
        add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=whole.switch("tie_word_embeddings", True))
        if decoder.is_first:
            add_formulas(tally, _MATRICES, _REST, fields, whole)
            if fields.given("position_embeddings_type") in (None, kind):
                add_formulas(tally, *positions, fields, whole)

    return add


add_seamless = _seamless("relative", _POSITIONS)
add_seamless_v2 = _seamless("relative_key", _DISTANCES)
