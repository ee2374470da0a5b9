"""Parts of a model that no count describes, and that a count must not leave out."""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.multimodal.known_types import DECODER_TYPES
from pagecore.models.multimodal.text_fields import NESTED
from pagecore.models.parameters.audio.encoders import AUDIO_PARTS

__all__ = ["refuse_unknown_parts"]

# Objects that describe no module, or one that other functions count or refuse.
_COUNTED = frozenset({*NESTED, *AUDIO_PARTS, "vision_config"})
_NO_MODULES = ("quantization", "compression", "generation")
# Fields of published files with an encoder, or its name, by the object that may describe it.
_NAMES: Mapping[str, str] = {
    "audio_model_id": "audio_config",
    **dict.fromkeys(("mm_vision_tower", "timm_model_ids", "vision_encoder", "visual"), "vision_config"),
    **dict.fromkeys(("vision_tower_cfg", "vlm_config"), "vision_config"),
}


def refuse_unknown_parts(whole: Fields, text: Fields) -> None:
    """Raise UnsupportedOption if a model has a part that is neither its text model nor counted elsewhere."""
    for name, part in _NAMES.items():
        if whole.given(name) and not whole.has_object(part):
            _refuse(whole, name, whole.describe(name))
    kind = whole.given("model_type")
    if text is whole or kind in DECODER_TYPES:
        return
    for name in whole:
        is_part = name.endswith(("_config", "_cfg")) and not name.startswith(_NO_MODULES)
        is_part = is_part and name not in _COUNTED and (kind, name) != ("ovis", "visual_tokenizer_config")
        if is_part and isinstance(whole.given(name), Mapping) and whole.given(name):
            _refuse(whole, name, f"{whole.describe('model_type')}, which is unknown, and has a {name}")


def _refuse(whole: Fields, name: str, found: str) -> None:
    raise UnsupportedOption(
        f"{whole.source}: {found}, whose parameters cannot be counted: remove {name} to plan the other parts alone, or "
        "pass weights= in bytes"
    )
