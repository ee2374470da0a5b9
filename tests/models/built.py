"""Families that `test_built` and `test_stored` compare with models, instead of with recorded attributes."""

from pagecore.models.bert_kin import BERT_KIN
from pagecore.models.linear import LINEAR
from pagecore.models.recent import RECENT
from pagecore.models.remote import REMOTE
from pagecore.models.speech import SPEECH
from pagecore.models.text_models import TEXT_PARTS

__all__ = ["BUILT"]

OF_STATES = {
    "bailing_hybrid",
    "glm5_next_text",
    "minimax",
    "minimax_m1",
    "minimax_text_01",
    "qwen4_exp_text",
    "recurrent_gemma",
    "zaya",
}
OF_LATENTS = {"axk2", "dots3_note_text", "hy_v4", "mistral_large4_text"}
BUILT = {*BERT_KIN, *TEXT_PARTS, *RECENT, *REMOTE, *SPEECH, *LINEAR, *OF_STATES, *OF_LATENTS}
BUILT |= {"gemma3n_text", "gemma4_unified_text"}
