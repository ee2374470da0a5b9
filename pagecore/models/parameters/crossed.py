"""Parameters of models whose decoder layers attend to an encoder, by the type of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagecore.models.crossed import CROSSED
from pagecore.models.fields import Fields
from pagecore.models.parameters.crossed_parts import CrossedDecoder
from pagecore.models.parameters.crossed_sound import add_dia, add_moonshine, add_musicgen
from pagecore.models.parameters.crossed_text import add_pix2struct, add_t5gemma, add_trocr
from pagecore.models.parameters.tally import Tally, check_stage
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["COUNTED_CROSSED", "add_crossed"]

COUNTED_CROSSED: Mapping[str, Callable[[Tally, Fields, CrossedDecoder], None]] = {
    "dia": add_dia,
    "moonshine": add_moonshine,
    "musicgen": add_musicgen,
    "pix2struct": add_pix2struct,
    "t5gemma": add_t5gemma,
    "trocr": add_trocr,
}
_DEFAULTS: Mapping[str, object] = {"attention_bias": False, "head_dim": None}


def add_crossed(
    tally: Tally, whole: Fields, model_type: str, specs: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> None:
    """Add the parameters of a model, or of a stage of its decoder; `specs` are those of its config.

    The stage of the first layer has the encoder and the embeddings, that of the last one the head.
    """
    crossed = CROSSED[model_type]
    fields = whole.inner(crossed.path) if crossed.path else whole
    fields.defaults, fields.aliases = {**_DEFAULTS, **crossed.family.defaults}, crossed.family.aliases
    fields.sizes = crossed.sizes
    count = len(specs) // 2
    layers = check_stage(range(count) if stage is None else stage, count)
    own, cross = ([specs[layer + start] for layer in layers] for start in (0, count))
    COUNTED_CROSSED[model_type](
        tally, whole, CrossedDecoder(fields, own, cross, layers.start == 0, layers.stop == count)
    )
