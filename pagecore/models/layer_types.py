"""Types of layers, named as in `layer_types` of transformers."""

from __future__ import annotations

__all__ = [
    "CHUNKED_LAYER",
    "FULL",
    "HYBRID",
    "HYBRID_SLIDING",
    "LINEAR",
    "NEITHER",
    "SLIDING",
    "attends",
    "keeps_state",
]

FULL, SLIDING, CHUNKED_LAYER = "full_attention", "sliding_attention", "chunked_attention"
# A layer that is neither attends nor keeps a state: it is an MLP of its own.
LINEAR, HYBRID, HYBRID_SLIDING, NEITHER = "linear_attention", "hybrid", "hybrid_sliding", "mlp"


def attends(kind: str) -> bool:
    """Return True if layers of a kind store keys and values, or latents."""
    return kind in (FULL, HYBRID)


def keeps_state(kind: str) -> bool:
    """Return True if layers of a kind keep a state."""
    return kind in (LINEAR, HYBRID)
