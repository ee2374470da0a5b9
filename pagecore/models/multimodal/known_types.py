"""Names of the model types that are supported, and of those closest to an unknown one."""

from __future__ import annotations

import difflib
import functools

from pagecore.models.encoders.specs import ENCODER_TYPES
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL, TEXT_FIELDS, TEXT_MODELS, THINKERS, VERSIONED

__all__ = ["DECODER_TYPES", "closest_types", "known_types"]

# Types of models without an encoder of text, and of multimodal models.
DECODER_TYPES = frozenset({*FAMILIES, *TEXT_MODELS, *TEXT_FIELDS, *ANY_TEXT_MODEL, *THINKERS, *VERSIONED})
_CLOSE = 5


def known_types() -> list[str]:
    """Return the supported values of `model_type`, sorted without regard to case."""
    return sorted(DECODER_TYPES | ENCODER_TYPES, key=lambda name: (name.lower(), name))


def closest_types(model_type: object) -> str:
    """Return a sentence with the supported types that resemble one, and with the places that list all of them."""
    return _closest(model_type.lower() if isinstance(model_type, str) else "")


@functools.lru_cache
def _closest(wanted: str) -> str:
    known = known_types()
    lowered = {name.lower(): name for name in known}
    found = [lowered[name] for name in difflib.get_close_matches(wanted, lowered, _CLOSE, 0.5)]
    close = f"the closest known types are {', '.join(map(repr, found))}" if found else "no known type resembles it"
    return f"{close}; docs/models.md and 'pagecore plan --families' list all {len(known)}"
