"""The structure of the layers of every family whose parameters are counted, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.parameters.counting.traits import Traits
from pagecore.models.parameters.structures.bert import BERT
from pagecore.models.parameters.structures.full_attention import FULL_ATTENTION
from pagecore.models.parameters.structures.gpt import GPT
from pagecore.models.parameters.structures.heads_by_layer import HEADS_BY_LAYER
from pagecore.models.parameters.structures.hybrids import HYBRIDS
from pagecore.models.parameters.structures.inkling import INKLING
from pagecore.models.parameters.structures.latent_attention import LATENT_ATTENTION
from pagecore.models.parameters.structures.recurrent import RECURRENT
from pagecore.models.parameters.structures.remote.code import REMOTE_CODE
from pagecore.models.parameters.structures.remote.engine_models import ENGINE_MODELS
from pagecore.models.parameters.structures.remote.llamas import REMOTE_LLAMAS
from pagecore.models.parameters.structures.sliding_windows import SLIDING_WINDOWS
from pagecore.models.parameters.structures.speech import SPEECH
from pagecore.models.parameters.structures.with_images import WITH_IMAGES

__all__ = ["STRUCTURES"]

STRUCTURES: Mapping[str, Traits] = {
    **FULL_ATTENTION,
    **SLIDING_WINDOWS,
    **HEADS_BY_LAYER,
    **LATENT_ATTENTION,
    **HYBRIDS,
    **INKLING,
    **RECURRENT,
    **GPT,
    **BERT,
    **SPEECH,
    **REMOTE_CODE,
    **REMOTE_LLAMAS,
    **ENGINE_MODELS,
    **WITH_IMAGES,
}
