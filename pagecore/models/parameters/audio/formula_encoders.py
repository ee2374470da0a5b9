"""Audio encoders whose layers no other encoder has, as formulas of their fields, each with its projector.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.resamplers import Q_FORMER, add_q_former

__all__ = ["FORMULA_ENCODERS", "FormulaEncoder"]


@dataclass(frozen=True)
class FormulaEncoder:
    """An encoder of sound, and the projector to the features of the text model.

    Parameters
    ----------
    matrices, rest : str
        Parameters of matrices, which ranks share, and of biases, norms and convolutions of single channels.
    add_projector : callable, optional
        Adds what a formula does not describe.
    defaults : mapping
        Values of fields that published files leave out.
    """

    matrices: str
    rest: str
    add_projector: Callable[[Tally, Fields, int], None] = lambda _tally, _whole, _text: None
    defaults: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
        """Add the parameters."""
        fields.defaults = self.defaults
        whole.defaults = {**whole.defaults, **self.defaults}
        add_formulas(tally, self.matrices, self.rest, fields, whole, {"text": text})
        self.add_projector(tally, whole, text)


def _granite_projector(tally: Tally, whole: Fields, text: int) -> None:
    """Add the Q-Former that reads a window of sound, with a query for each part of it that becomes a token."""
    whole.defaults = {**whole.defaults, "window_size": 15, "downsample_rate": 5}
    former = whole.inner("projector_config")
    former.defaults = {**Q_FORMER, "encoder_hidden_size": 1408}
    queries = whole.integer("window_size") // whole.integer("downsample_rate")
    add_q_former(tally, former, former.integer("encoder_hidden_size"), queries, text)


_CONFORMER = FormulaEncoder(
    """input_dim * hidden_dim + 2 * hidden_dim * output_dim
    + num_layers * (
        4 * feedforward_mult * hidden_dim ** 2
        + 4 * hidden_dim * num_heads * dim_head
        + 3 * conv_expansion_factor * hidden_dim ** 2)""",
    """2 * hidden_dim + output_dim
    + num_layers * (
        (2 * feedforward_mult + 14) * hidden_dim
        + (2 * max_pos_emb + 1) * dim_head
        + (conv_kernel_size + 4) * conv_expansion_factor * hidden_dim)""",
    _granite_projector,
)

FORMULA_ENCODERS: Mapping[str, FormulaEncoder] = {
    "inkling_audio": FormulaEncoder(
        "n_mel_bins * mel_vocab_size * text_hidden_size",
        "text_hidden_size",
        defaults={"n_mel_bins": 80, "mel_vocab_size": 256, "text_hidden_size": 6144},
    ),
    "fun_asr_nano_encoder": FormulaEncoder(
        """num_hidden_layers * (4 * hidden_size ** 2 + 2 * hidden_size * intermediate_size)
        + 3 * (num_mel_bins * num_stacked_frames - hidden_size) * hidden_size
        + (hidden_size + text) * adaptor_config.projector_hidden_size
        + adaptor_config.num_hidden_layers * (4 * text ** 2 + 2 * text * adaptor_config.intermediate_size)""",
        """num_hidden_layers * ((fsmn_kernel_size + 9) * hidden_size + intermediate_size)
        + 2 * (num_mel_bins * num_stacked_frames + hidden_size)
        + adaptor_config.projector_hidden_size + text
        + adaptor_config.num_hidden_layers * (9 * text + adaptor_config.intermediate_size)""",
    ),
    "granite_speech_encoder": _CONFORMER,
    "granite_speech_plus_encoder": _CONFORMER,
    "moss_transcribe_diarize_audio": FormulaEncoder(
        """3 * (num_mel_bins + hidden_size) * hidden_size
        + num_hidden_layers * (4 * hidden_size ** 2 + 2 * hidden_size * intermediate_size)
        + model.audio_merge_size * hidden_size * text + text ** 2""",
        """(max_source_positions + 4) * hidden_size
        + num_hidden_layers * (8 * hidden_size + intermediate_size)
        + 2 * (1 + model.projector_bias) * text""",
        defaults={"audio_merge_size": 4, "projector_bias": True},
    ),
    "voxtral_realtime_encoder": FormulaEncoder(
        """3 * (num_mel_bins + hidden_size) * hidden_size
        + num_hidden_layers * (
            4 * hidden_size * num_attention_heads * head_dim
            + 3 * hidden_size * intermediate_size)
        + model.downsample_factor * hidden_size * text + text ** 2""",
        """3 * hidden_size
        + num_hidden_layers * (4 * hidden_size + 2 * num_attention_heads * head_dim)""",
    ),
}
