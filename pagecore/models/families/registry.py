"""All families with one model of text, by `model_type`.

Families with an encoder are in `pagecore.models.encoders`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.families.bert import BERT
from pagecore.models.families.family import Family
from pagecore.models.families.full_attention import FULL_ATTENTION
from pagecore.models.families.gpt import GPT
from pagecore.models.families.heads_by_layer import HEADS_BY_LAYER
from pagecore.models.families.hybrids import HYBRIDS
from pagecore.models.families.inkling import INKLING
from pagecore.models.families.latent_attention import LATENT_ATTENTION
from pagecore.models.families.recurrent import RECURRENT
from pagecore.models.families.remote.code import REMOTE_CODE
from pagecore.models.families.remote.engine_models import ENGINE_MODELS
from pagecore.models.families.remote.hybrids import REMOTE_HYBRIDS
from pagecore.models.families.remote.llamas import REMOTE_LLAMAS
from pagecore.models.families.sliding_windows import SLIDING_WINDOWS
from pagecore.models.families.speech import SPEECH

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family] = {
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
    **REMOTE_HYBRIDS,
    **REMOTE_LLAMAS,
    **ENGINE_MODELS,
}
