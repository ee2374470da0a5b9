"""`generate` of Hugging Face transformers on a paged cache: the tokens of DynamicCache, and shared prefixes.

The models are small and random, one for each family.

Run it: python examples/transformers_generate.py [NEW_TOKENS]
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
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": GROUPED,
    "mistral": WINDOWED,
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neox": {},
    "gpt_oss": WINDOWED | {"num_local_experts": 4},
    "phi3": GROUPED,
}
NEW = {"max_new_tokens": int(sys.argv[1]) if len(sys.argv) > 1 else 20}
torch.set_num_threads(1)  # the models are too small for several threads


def make_model(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def compare(family: str, model: Any) -> None:
    """Compare greedy decoding, beam search and three samples for each prompt; the first of two prompts is padded."""
    prompts = torch.randint(2, 200, (2, 12))
    mask = torch.ones_like(prompts)
    mask[0, :5] = 0
    for options in ({"do_sample": False}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3}):
        texts = []
        for attention in ("eager", "pagecore"):  # generate makes a DynamicCache itself
            model.set_attn_implementation(attention)
            cache = {"cache": PagedCache(model, num_blocks=256)} if attention == "pagecore" else {}
            torch.manual_seed(1)
            texts.append(model.generate(prompts, attention_mask=mask, **cache, **options, **NEW))
        if not torch.equal(*texts):
            raise SystemExit(f"{family} differs from DynamicCache with {options}")
    print(f"{family:12} identical to DynamicCache")


def share(model: Any) -> None:
    """Answer questions about one document, which is computed once and whose blocks are shared."""
    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=256)
    document = torch.randint(2, 200, (1, 160))
    questions = [torch.cat([document, torch.randint(2, 200, (1, 10))], dim=1) for _ in range(4)]
    computed = 0
    for question in questions:
        computed += question.shape[1] - cache.begin(question)
        model.generate(question, attention_mask=torch.ones_like(question), cache=cache, **NEW)
    print(f"one by one: {computed} of {4 * 170} prompt columns computed")

    together = torch.cat(questions)
    reused = cache.begin(together)
    blocks = cache.kv.stats().num_used_blocks
    print(f"in a batch: {4 * reused} of {4 * 170} columns reused from {blocks} blocks; {4 * 10} blocks without sharing")
    model.generate(together, attention_mask=torch.ones_like(together), cache=cache, **NEW)


def main() -> None:
    for family, fields in FAMILIES.items():
        compare(family, make_model(family, **fields))
    share(make_model("llama"))


if __name__ == "__main__":
    main()
