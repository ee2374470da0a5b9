"""All families with one model of text, by `model_type`.

Families with an encoder are in `encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.bert_kin import BERT_KIN
from pagecore.models.earlier import EARLIER
from pagecore.models.families import FAMILIES, Family
from pagecore.models.hybrids import HYBRIDS
from pagecore.models.linear import LINEAR
from pagecore.models.llama_kin import LLAMA_KIN
from pagecore.models.mixed import MIXED
from pagecore.models.recent import RECENT
from pagecore.models.remote import REMOTE
from pagecore.models.speech import SPEECH
from pagecore.models.text_models import TEXT_PARTS

__all__ = ["SERVED"]

SERVED: Mapping[str, Family] = {
    **FAMILIES,
    **BERT_KIN,
    **LLAMA_KIN,
    **EARLIER,
    **MIXED,
    **TEXT_PARTS,
    **RECENT,
    **SPEECH,
    **REMOTE,
    **HYBRIDS,
    **LINEAR,
}
