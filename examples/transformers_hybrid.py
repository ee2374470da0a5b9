"""Hybrid models on a paged cache: the tokens of DynamicCache, and prompts that continue from checkpoints of states.

The models are small and random, one for each family.

Run it: python examples/transformers_hybrid.py [NEW_TOKENS]
"""

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagecore.interop.transformers import PagedCache

SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHUNK = 16  # tokens; Mamba 2 pads each prompt to whole chunks, by default of 256 tokens
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": CHUNK}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS
    | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16},
    "falcon_h1": MAMBA_2 | {"head_dim": 16, "mamba_d_ssm": 128},
    "bamba": MAMBA_2 | {"attn_layer_indices": [2]},
    "jamba": {
        "mamba_d_state": 16,
        "mamba_dt_rank": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
    },
    "zamba2": {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "num_mem_blocks": 1}
    | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "adapter_rank": 8}
    | {"num_key_value_heads": 4, "attention_head_dim": 32, "use_mem_rope": True, "chunk_size": CHUNK},
    "granitemoehybrid": MAMBA_2
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
}
NEW = {"max_new_tokens": int(sys.argv[1]) if len(sys.argv) > 1 else 20}
torch.set_num_threads(1)  # the models are too small for several threads


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def make_cache(model: Any) -> PagedCache:
    model.set_attn_implementation("pagecore")
    return PagedCache(model, num_blocks=256, max_sequences=16)


def reference(model: Any, prompts: torch.Tensor, **options: Any) -> Any:
    """Return the text with the DynamicCache that `generate` makes."""
    model.set_attn_implementation("eager")
    return model.generate(prompts, **options, **NEW)


def compare(family: str, model: Any) -> None:
    """Compare greedy decoding, beam search and three samples for each prompt; the first of two prompts is padded."""
    prompts = torch.randint(2, 200, (2, 12))
    mask = torch.ones_like(prompts)
    mask[0, :5] = 0
    for options in ({"do_sample": False}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3}):
        torch.manual_seed(1)
        expected = reference(model, prompts, attention_mask=mask, **options)
        cache = make_cache(model)
        torch.manual_seed(1)
        text = model.generate(prompts, attention_mask=mask, cache=cache, **options, **NEW)
        if not torch.equal(text, expected):
            raise SystemExit(f"{family} differs from DynamicCache with {options}")
    print(f"{family:16} identical to DynamicCache")


def share(model: Any) -> None:
    """Answer questions about one document; states are reused where a checkpoint was kept."""
    cache = make_cache(model)
    document = torch.randint(2, 200, (1, 160))
    computed = 0
    for _ in range(6):
        question = torch.cat([document, torch.randint(2, 200, (1, 10))], dim=1)
        expected = reference(model, question, attention_mask=torch.ones_like(question), do_sample=False)
        model.set_attn_implementation("pagecore")
        computed += question.shape[1] - cache.begin(question)
        options = {"attention_mask": torch.ones_like(question), "cache": cache, "do_sample": False}
        if not torch.equal(model.generate(question, **options, **NEW), expected):
            raise SystemExit("a prompt that continues from a checkpoint differs from DynamicCache")
    print(f"questions about one document: {computed} of {6 * 170} prompt columns computed, with the same tokens")


def main() -> None:
    for family in FAMILIES:
        compare(family, make_model(family))
    share(make_model("qwen3_next"))


if __name__ == "__main__":
    main()
