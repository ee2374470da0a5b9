"""Parameters of the vision tower of Gemma 3n, a network of convolutions that timm defines by its name.

Source: the configuration and modeling files of transformers 5; the parameters of the network as timm 1.0.31 builds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_gemma_3n_vision", "has_convolutions"]

_DEFAULTS: Mapping[str, object] = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 128}
_NETWORKS: Mapping[str, int] = {"mobilenetv5_300m_enc": 294_126_912}


def has_convolutions(whole: Fields) -> bool:
    """Return True if the images of a model go through convolutions instead of layers that attend."""
    return bool(whole.given("model_type") in ("fast_vlm", "gemma3n"))


def add_gemma_3n_vision(tally: Tally, whole: Fields, text: int) -> None:
    """Add the network, the embeddings of the tokens around images, and the projector."""
    fields = whole.inner("vision_config")
    fields.defaults = _DEFAULTS
    network = fields.value("architecture")
    if not isinstance(network, str) or network not in _NETWORKS:
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('architecture')}, a network that is unknown; expected "
            f"{', '.join(_NETWORKS)}: remove vision_config to plan the text model alone"
        )
    encoder_add(tally, _NETWORKS[network])
    add_formulas(tally, "hidden_size * text", "(vocab_size + 2) * hidden_size", fields, whole, {"text": text})
