"""Projectors from the features of a vision tower to those of the text model, by the type of the whole model.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.document_towers import DOCUMENT_PROJECTORS
from pagecore.models.parameters.vision.dots_3 import project_dots_3
from pagecore.models.parameters.vision.formulas import FORMULA_PROJECTORS
from pagecore.models.parameters.vision.idefics import add_idefics_resampler
from pagecore.models.parameters.vision.janus import add_janus
from pagecore.models.parameters.vision.mllama_tower import project_mllama, project_moss
from pagecore.models.parameters.vision.resamplers import RESAMPLERS
from pagecore.models.parameters.vision.tower_parts import Projector, count_colours
from pagecore.models.parameters.vision.two_towers import project_deepseek_hybrid, project_video_llava

__all__ = ["PROJECTORS"]


def _qwen(norm_bias: bool, outputs: str = "out_hidden_size") -> Projector:
    def add(tally: Tally, _whole: Fields, fields: Fields, hidden: int, merge: int, depths: int, _text: int) -> None:
        merged = hidden * merge**2
        # The merger of a deep stack normalises merged patches, the other one single patches.
        for depth in range(depths):
            encoder_add(tally, (merged if depth else hidden) * (1 + norm_bias))
            encoder_linear(tally, merged, merged, bias=True)
            encoder_linear(tally, merged, fields.integer(outputs), bias=True)

    return add


def _llava(has_newline: bool = False, has_norm: bool = False) -> Projector:
    def add(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
        chosen = whole.given("vision_feature_layer")
        if chosen is None and has_norm:
            whole.refuse(f"{whole.name('vision_feature_layer')} is missing; add it to the config")
        inputs = hidden * (len(chosen) if isinstance(chosen, list | tuple) else 1)
        has_bias = has_norm or whole.switch("multimodal_projector_bias", True)
        encoder_add(tally, text * has_newline + 2 * inputs * has_norm)
        encoder_linear(tally, inputs, text, bias=has_bias)
        encoder_linear(tally, text, text, bias=has_bias)

    return add


def _gemma(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    encoder_linear(tally, hidden, text)
    encoder_add(tally, hidden)


def _linear(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    encoder_linear(tally, hidden, text)


def _mistral(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    has_bias = whole.switch("multimodal_projector_bias", False)
    chosen = whole.given("vision_feature_layer")
    inputs = hidden * (len(chosen) if isinstance(chosen, list | tuple) else 1)
    encoder_add(tally, hidden)
    encoder_linear(tally, hidden * merge**2, hidden)
    encoder_linear(tally, inputs, text, bias=has_bias)
    encoder_linear(tally, text, text, bias=has_bias)


def _cohere(has_norm: bool) -> Projector:
    def add(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
        inputs = hidden * merge**2
        is_given = whole.given("alignment_intermediate_size") is not None or not has_norm
        width = whole.integer("alignment_intermediate_size") if is_given else text
        encoder_add(tally, 2 * inputs * has_norm)
        encoder_linear(tally, inputs, width, bias=True)
        encoder_linear(tally, width // 2, text, bias=True)

    return add


def _idefics(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    encoder_linear(tally, hidden * merge**2, text)


def _internvl(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    inputs = hidden * merge**2
    encoder_add(tally, 2 * inputs)
    encoder_linear(tally, inputs, text, bias=True)
    encoder_linear(tally, text, text, bias=True)


def _glm(is_ocr: bool = False, width_field: str = "intermediate_size") -> Projector:
    def add(tally: Tally, _whole: Fields, fields: Fields, hidden: int, merge: int, _depths: int, _text: int) -> None:
        outputs = fields.integer("out_hidden_size")
        width = outputs * count_colours(fields) if is_ocr else fields.integer(width_field)
        encoder_add(tally, 2 * outputs)
        encoder_linear(tally, hidden * merge**2, outputs, bias=True)
        encoder_linear(tally, outputs, outputs)
        encoder_linear(tally, outputs, width, copies=2)
        encoder_linear(tally, width, outputs)

    return add


def _lfm(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    inputs, width = hidden * merge**2, whole.integer("projector_hidden_size")
    has_bias = whole.switch("projector_bias", True)
    encoder_add(tally, 2 * inputs * (whole.switch("projector_use_layernorm", True)))
    encoder_linear(tally, inputs, width, bias=has_bias)
    encoder_linear(tally, width, text, bias=has_bias)


def _two_layers(
    tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    encoder_linear(tally, hidden, text, bias=True)
    encoder_linear(tally, text, text, bias=True)


def _deepseek(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    """Add an MLP, and the marks around an image and at the end of its lines."""
    encoder_add(tally, 3 * text)
    encoder_linear(tally, hidden * merge**2, text, bias=True)
    encoder_linear(tally, text, text, bias=True)


def _visual_words(
    tally: Tally, whole: Fields, fields: Fields, _hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add the embeddings of the words that a tower chooses from."""
    features = whole.integer("hidden_size") if whole.given("hidden_size") is not None else text
    encoder_add(tally, fields.integer("vocab_size") * features)


def _kimi(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    merged = hidden * merge**2
    encoder_add(tally, 2 * hidden)
    encoder_linear(tally, merged, merged, bias=True)
    encoder_linear(tally, merged, text, bias=True)


def _llama_4(tally: Tally, _whole: Fields, fields: Fields, _hidden: int, _merge: int, _depths: int, text: int) -> None:
    projected, outputs = fields.integer("projector_input_dim"), fields.integer("projector_output_dim")
    encoder_linear(tally, fields.integer("intermediate_size"), projected)
    encoder_linear(tally, outputs, outputs)
    encoder_linear(tally, fields.integer("vision_output_dim"), text)


def _cosmos(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    width = whole.integer("projector_hidden_size")
    encoder_add(tally, 2 * hidden)
    encoder_linear(tally, hidden * merge**2, width, bias=True)
    encoder_linear(tally, width, text, bias=True)


def _hunyuan(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    """Add two convolutions, a projection, two norms, and the tokens around an image and its lines."""
    encoder_linear(tally, hidden * merge**2, 2 * hidden, bias=True)
    encoder_linear(tally, 2 * hidden, 4 * hidden, bias=True)
    encoder_linear(tally, 4 * hidden, text, bias=True)
    encoder_add(tally, 5 * hidden + 4 * text)


def _hyperclova(tally: Tally, whole: Fields, fields: Fields, hidden: int, merge: int, depths: int, text: int) -> None:
    _qwen(norm_bias=False)(tally, whole, fields, hidden, merge, depths, text)
    encoder_linear(tally, fields.integer("out_hidden_size"), text, bias=True)


def _minicpm(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add the MLPs that merge four patches each; the last one has the features of the text model."""
    rounds = 1 if whole.given("merger_times") is None else whole.integer("merger_times")
    for outputs in [hidden] * (rounds - 1) + [text]:
        encoder_add(tally, 8 * hidden)
        encoder_linear(tally, 4 * hidden, 4 * hidden, bias=True)
        encoder_linear(tally, 4 * hidden, outputs, bias=True)


def _minimax(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    width = whole.integer("projector_hidden_size")
    for inputs in (hidden, text * merge**2):
        encoder_linear(tally, inputs, width, bias=True)
        encoder_linear(tally, width, text, bias=True)


def _muse(tally: Tally, whole: Fields, _fields: Fields, _hidden: int, _merge: int, _depths: int, text: int) -> None:
    width = whole.integer("projector_hidden_size")
    encoder_linear(tally, whole.integer("out_hidden_size"), width)
    encoder_linear(tally, width, width)
    encoder_linear(tally, width, text)


def _got(tally: Tally, _whole: Fields, fields: Fields, _hidden: int, _merge: int, _depths: int, text: int) -> None:
    channels = fields.integer("output_channels")
    encoder_linear(tally, 9 * channels, 2 * channels)
    encoder_linear(tally, 18 * channels, text)
    encoder_linear(tally, text, text, bias=True)


def _step(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    encoder_linear(tally, 4 * hidden, text, bias=whole.switch("projector_bias", False))


_GLM = _glm()
_QWEN = _qwen(norm_bias=True)
PROJECTORS: Mapping[str, Projector] = {
    **DOCUMENT_PROJECTORS,
    **FORMULA_PROJECTORS,
    **RESAMPLERS,
    "aya_vision": _cohere(has_norm=True),
    "cohere2_vision": _cohere(has_norm=False),
    "cohere_compass": _QWEN,
    "cosmos3_edge": _cosmos,
    "cosmos3_omni": _QWEN,
    "deepseek_v41": _deepseek,
    "deepseek_vl": _two_layers,
    "deepseek_vl_hybrid": project_deepseek_hybrid,
    "dots3_note": project_dots_3,
    "exaone4_5": _qwen(norm_bias=False),
    "gemma3": _gemma,
    "glm5_next": _glm(width_field="projection_intermediate_size"),
    "gemma4": _linear,
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _glm(is_ocr=True),
    "glmga": _GLM,
    "got_ocr2": _got,
    "hunyuan_vl": _hunyuan,
    "hyperclovax_vision_v2": _hyperclova,
    "idefics": add_idefics_resampler,
    "idefics3": _idefics,
    **dict.fromkeys(("eagle_2_5_vl", "h2ovl_chat", "interns1", "internvl", "internvl_chat", "skywork_chat"), _internvl),
    "janus": add_janus,
    "kimi_k25": _kimi,
    "kimi_vl": _kimi,
    "lfm2_vl": _lfm,
    "lighton_ocr": _mistral,
    "llama4": _llama_4,
    "llava": _llava(),
    "llava_next": _llava(has_newline=True),
    "llava_next_video": _llava(has_newline=True),
    "llava_onevision": _llava(has_newline=True),
    "minicpm_ocr": _minicpm,
    "minicpmv4_6": _minicpm,
    "minicpmv4_7": _minicpm,
    "minimax_m3_vl": _minimax,
    "mistral3": _mistral,
    "mistral_large4": _mistral,
    "mllama": project_mllama,
    "moss_vl": project_moss,
    "muse_glimmer": _muse,
    "muse_spark": _muse,
    "ovis2": _visual_words,
    "paddleocr_vl": _kimi,
    "pp_chart2table": _got,
    "qianfan_ocr": _internvl,
    "qwen2_vl": _qwen(norm_bias=True, outputs="hidden_size"),
    "qwen2_5_omni_thinker": _qwen(norm_bias=False),
    "qwen2_5_vl": _qwen(norm_bias=False),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    **dict.fromkeys(("qwen4_exp", "qwen3_8_flash_next"), _QWEN),
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "shieldgemma2": _gemma,
    "smolvlm": _idefics,
    "step3p7": _step,
    "video_llama_3": _two_layers,
    "video_llava": project_video_llava,
    "vipllava": _llava(has_norm=True),
}
