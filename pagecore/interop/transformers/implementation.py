"""Name of the attention implementation, and the check that a model uses it."""

from __future__ import annotations

from transformers import PreTrainedModel

from pagecore.errors import UnsupportedOption

NAME = "pagecore"
# Models that attend to keys other than those that they store, such as copies for each expert.
_REPEATING = frozenset({"jetmoe"})
REMEDY = f'call model.set_attn_implementation("{NAME}")'


def check_implementation(model: PreTrainedModel) -> None:
    """Raise UnsupportedOption unless the attention implementation of the model is "pagecore"."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _REPEATING:
        raise UnsupportedOption(
            f"the {type(model).__name__} repeats keys and values after storing them; use another cache"
        )
    name = config._attn_implementation
    if name == NAME:
        return
    if not getattr(type(model), "_can_set_attn_implementation", lambda: True)():
        raise UnsupportedOption(
            f"the {type(model).__name__} computes attention by code of its own, which transformers cannot replace; use "
            "another cache"
        )
    raise UnsupportedOption(f"the model's attention implementation is {name!r}; {REMEDY}")
