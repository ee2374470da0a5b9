"""Whisper, BART and T5 on a paged cache: the tokens of their own caches, with one copy of each encoder output.

The models are small and random.

Run it: python examples/transformers_whisper.py [NEW_TOKENS]
"""

import sys
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from pagecore.interop.transformers import PagedEncoderDecoderCache

IDS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 60, "decoder_start_token_id": 2}
STACKS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
MODES = ({"do_sample": False}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3})
NEW_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
torch.set_num_threads(1)  # the models are too small for several threads


def make_models() -> dict[str, Any]:
    """Make a small model of each family with random weights."""
    torch.manual_seed(0)
    whisper = WhisperConfig(**IDS, **STACKS, num_mel_bins=8, max_source_positions=1500)
    bart = BartConfig(**IDS, **STACKS, forced_eos_token_id=None)
    t5 = T5Config(**IDS, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    models: dict[str, Any] = {
        "whisper": WhisperForConditionalGeneration(whisper),
        "bart": BartForConditionalGeneration(bart),
        "t5": T5ForConditionalGeneration(t5),
    }
    return models


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    """Return two inputs: 30 seconds of features, or ids of which the second row is padded."""
    torch.manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 3000)}
    ids, mask = torch.randint(3, 60, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def compare(family: str, model: Any) -> None:
    """Generate in three modes with the model's own cache and with a paged cache; exit if the tokens differ."""
    model.eval()
    inputs = inputs_of(family)
    for options in MODES:
        texts = []
        for attention in ("sdpa", "pagecore"):
            model.set_attn_implementation(attention)
            cache = PagedEncoderDecoderCache(model, num_blocks=400) if attention == "pagecore" else None
            given = {} if cache is None else {"cache": cache}
            torch.manual_seed(2)
            texts.append(model.generate(**inputs, **given, max_new_tokens=NEW_TOKENS, **options))
        if not torch.equal(*texts):
            raise SystemExit(f"{family} differs from its own cache with {options}")
    assert cache is not None
    held = cache.kv.block_map(1)
    blocks, holders = int((held.holders > 0).sum()), int(held.holders.sum())
    print(f"{family:8} identical to its own cache; {blocks} blocks of encoder tokens, held {holders} times")


for name, one in make_models().items():
    compare(name, one)
