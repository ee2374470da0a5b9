"""Published config files, reduced to the fields that could matter to a cache.

Fields that are missing in the original are missing here, too.
"""

from tests.models.earlier import EARLIER_CONFIGS
from tests.models.published.fewest import FEWEST_FIELDS
from tests.models.published.full_attention import FULL_ATTENTION
from tests.models.published.kin import KIN_PUBLISHED
from tests.models.published.latents import LATENTS
from tests.models.published.multimodal import MULTIMODAL
from tests.models.published.sliding_windows import SLIDING_WINDOWS

__all__ = ["LLAMA_4_SCOUT", "PUBLISHED"]

PUBLISHED = {
    **FULL_ATTENTION,
    **SLIDING_WINDOWS,
    **MULTIMODAL,
    **LATENTS,
    **FEWEST_FIELDS,
    **KIN_PUBLISHED,
    **EARLIER_CONFIGS,
}

# Layers that attend in chunks.
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "llama4_vision_model"},
}
