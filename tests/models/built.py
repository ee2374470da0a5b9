"""Families that `test_built` compares with models as transformers builds them, instead of with recorded attributes."""

from pagecore.models.bert_kin import BERT_KIN
from pagecore.models.recent import RECENT
from pagecore.models.text_models import TEXT_PARTS

__all__ = ["BUILT"]

OF_STATES = {"bailing_hybrid", "minimax", "minimax_text_01", "recurrent_gemma"}
BUILT = {*BERT_KIN, *TEXT_PARTS, *RECENT, *OF_STATES, "axk2", "gemma3n_text", "gemma4_unified_text"}
