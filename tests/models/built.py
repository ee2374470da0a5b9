"""Families by the tests that compare them with models that transformers builds."""

from pagecore.models.families.bert import BERT
from pagecore.models.families.inkling import INKLING
from pagecore.models.families.remote.code import REMOTE_CODE
from pagecore.models.families.remote.engine_models import ENGINE_MODELS
from pagecore.models.families.remote.hybrids import REMOTE_HYBRIDS
from pagecore.models.families.remote.llamas import REMOTE_LLAMAS
from pagecore.models.families.speech import SPEECH
from tests.models.earlier import EARLIER_TYPES

__all__ = ["BUILT", "COUNTED_ELSEWHERE", "COUNTED_TEXT"]

OF_STATES = {
    "bailing_hybrid",
    "glm5_next_text",
    "lara_mini",
    "minimax",
    "minimax_m1",
    "minimax_text_01",
    "qwen3_8_flash_next_text",
    "qwen4_exp_text",
    "recurrent_gemma",
    "zaya",
}
OF_LATENTS = {"axk2", "dots3_note_text", "hy_v4", "hy_v4_vl_text", "mistral_large4_text"}
# Families with rows next to attention, which families/test_rows.py compares.
OF_ROWS = {"deepseek_v4", "deepseek_v41_text", "step5"}
TEXT_PARTS = {
    "apertus1p5_text",
    "cosmos3_edge_text",
    "deepseek_ocr2_text",
    "emu3_text_model",
    "ernie4_5_vl_moe_text",
    "gemma3n_text",
    "gemma4_unified_text",
    "glm4v_moe_text",
    "glm_image_text",
    "glm_ocr_text",
    "granite4_vision_text",
    "granite_docling_text",
    "hunyuan_vl_text",
    "molmo2_text",
    "paddleocr_vl_text",
    "qwen2_5_omni_text",
    "qwen3_omni_moe_text",
    "voxtral_realtime_text",
}
OF_RULES = {
    "beam",
    "chameleon",
    "cohere_compass_text",
    "diffllama",
    "doge",
    "flint",
    "git",
    "hrm_text",
    "idefics",
    "kosmos_2_5_text_model",
    "kosmos_2_text_model",
    "muse_glimmer_text",
    "muse_spark_text",
    "step3p5",
    "unlimited_ocr_text",
}
# Families of remote code, which families/test_remote_code.py compares with published sizes.
REMOTE = {*REMOTE_CODE, *REMOTE_HYBRIDS, *REMOTE_LLAMAS, *ENGINE_MODELS, "mimo_v2", "pangu_ultra_moe", "sarvam_mla"}
# Families that families/test_built.py and families/test_small_caches.py compare, instead of with recorded attributes.
BUILT = {*BERT, *TEXT_PARTS, *OF_RULES, *REMOTE, *SPEECH, *INKLING, "rwkv", "xlstm", *OF_STATES, *OF_LATENTS, *OF_ROWS}

# Families whose parameters parameters/test_text_models.py counts.
COUNTED_TEXT = [
    *(
        "apertus1p5_text",
        "hy_v4_vl_text",
        "axk2",
        "beam",
        "cohere_compass_text",
        "cosmos3_edge_text",
        "emu3_text_model",
        "flint",
        "glm4v_moe_text",
    ),
    *("glm_ocr_text", "granite4_vision_text", "granite_docling_text", "hunyuan_vl_text", "kosmos_2_5_text_model"),
    *("kosmos_2_text_model", "molmo2_text", "muse_glimmer_text", "paddleocr_vl_text", "qwen2_5_omni_text"),
    *("qwen3_omni_moe_text", "voxtral_realtime_text"),
]
# Families that other tests than the sweep of parameters/test_sweep.py count.
COUNTED_ELSEWHERE = {*COUNTED_TEXT, *EARLIER_TYPES, *BERT, *REMOTE, *SPEECH, *INKLING, "rwkv", "xlstm"}
COUNTED_ELSEWHERE |= {"deepseek_v41_text", "domyn_edge", "iquest_q1", "qwen3_8_flash_next_text"}
COUNTED_ELSEWHERE |= {"dots3_note_text", "glm5_next_text", "hrm_text", "hy_v4", "mistral_large4_text"}
COUNTED_ELSEWHERE |= {"chameleon", "deepseek_ocr2_text", "ernie4_5_vl_moe_text", "phi4_multimodal"}
COUNTED_ELSEWHERE |= {"glm_image_text", "idefics", "muse_spark_text", "step3p5", "unlimited_ocr_text", "zaya"}
