"""Parameters of models whose decoder layers attend to an encoder, by the type of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.cross_attention import CROSS_DECODERS
from pagecore.models.parameters.counting.tally import Tally, check_stage
from pagecore.models.parameters.encoders.cross_layers import DecoderStage
from pagecore.models.parameters.encoders.documents import add_pp_formulanet
from pagecore.models.parameters.encoders.seamless import add_seamless, add_seamless_v2
from pagecore.models.parameters.encoders.sound import add_dia, add_moonshine, add_moonshine_streaming, add_musicgen
from pagecore.models.parameters.encoders.text_and_images import (
    add_blip,
    add_pix2struct,
    add_t5gemma,
    add_t5gemma2,
    add_trocr,
)
from pagecore.models.parameters.encoders.transcription import add_canary, add_cohere_asr, add_speecht5
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["COUNTED_CROSS_DECODERS", "add_cross_decoder"]

COUNTED_CROSS_DECODERS: Mapping[str, Callable[[Tally, Fields, DecoderStage], None]] = {
    "blip": add_blip,
    "canary": add_canary,
    "cohere_asr": add_cohere_asr,
    "dia": add_dia,
    "moonshine": add_moonshine,
    "moonshine_streaming": add_moonshine_streaming,
    "musicgen": add_musicgen,
    "pix2struct": add_pix2struct,
    "pp_formulanet": add_pp_formulanet,
    "seamless_m4t": add_seamless,
    "seamless_m4t_v2": add_seamless_v2,
    "speecht5": add_speecht5,
    "t5gemma": add_t5gemma,
    "t5gemma2": add_t5gemma2,
    "trocr": add_trocr,
}
_DEFAULTS: Mapping[str, object] = {"attention_bias": False, "head_dim": None}


def add_cross_decoder(
    tally: Tally, whole: Fields, model_type: str, specs: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> None:
    """Add the parameters of a model, or of a stage of its decoder; `specs` are those of its config.

    The stage of the first layer has the encoder and the embeddings, that of the last one the head.
    """
    crossed = CROSS_DECODERS[model_type]
    fields = whole.inner(crossed.path) if crossed.path else whole
    fields.defaults, fields.aliases = {**_DEFAULTS, **crossed.family.defaults}, crossed.family.aliases
    fields.sizes = crossed.sizes
    count = len(specs) // 2
    layers = check_stage(range(count) if stage is None else stage, count)
    own, cross = ([specs[layer + start] for layer in layers] for start in (0, count))
    COUNTED_CROSS_DECODERS[model_type](
        tally, whole, DecoderStage(fields, own, cross, layers.start == 0, layers.stop == count)
    )
