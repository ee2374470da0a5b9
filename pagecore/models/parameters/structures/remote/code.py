"""Structure of the layers of families whose code is published together with their weights.

Source: as for `pagecore.models.families.remote.code`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import half_as_wide

__all__ = ["REMOTE_CODE"]


def _biases_of_chatglm(fields: Fields) -> Settled:
    has_biases = fields.flag("add_bias_linear")
    return {"qkv_bias": has_biases or fields.flag("add_qkv_bias"), "output_bias": has_biases, "mlp_bias": has_biases}


def _residual_mlp_of_arctic(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add the MLP next to the experts of a layer, which is as wide as the hidden size, and its norm."""
    if fields.flag("parallel_attn_mlp_res") and (layer + 1) % fields.integer("decoder_sparse_step") == 0:
        hidden = fields.integer("hidden_size")
        tally.norm(hidden)
        tally.linear(hidden, hidden, copies=2, name="residual_mlp.w1")
        tally.linear(hidden, hidden, name="residual_mlp.w2")


REMOTE_CODE: Mapping[str, Traits] = {
    "arctic": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", rule="step"),
        add_to_layer=_residual_mlp_of_arctic,
        defaults={"parallel_attn_mlp_res": False, "decoder_sparse_step": 2},
        aliases={"decoder_sparse_step": "moe_layer_frequency"},
    ),
    "baichuan": Traits(),
    "chatglm": Traits(
        settle=_biases_of_chatglm,
        defaults={"add_qkv_bias": False},
        aliases={"intermediate_size": "ffn_hidden_size", "vocab_size": "padded_vocab_size"},
    ),
    "deepseek": Traits(experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after")),
    "exaone": Traits(),
    "grok-1": Traits(norms=4, is_tied=True, experts=Experts(width="intermediate_size")),
    "internlm2": Traits(qkv_bias="bias", output_bias="bias", defaults={"bias": True}),
    "mimo": Traits(qkv_bias=True),
    "minicpm": Traits(is_tied=True),
    "nemotron-nas": biased_traits(mlp_bias="mlp_bias"),
    "phi4mm": Traits(),
    "qwen": Traits(qkv_bias=True, settle=half_as_wide),
    "step3_text": Traits(
        query_rank="share_q_dim",
        experts=Experts("moe_num_experts", shared="share_expert_dim", rule="numbered"),
        defaults={"first_k_dense_replace": 4, "share_q_dim": 2048},
    ),
}
