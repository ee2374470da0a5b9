"""Small models with an encoder and random weights, for comparing a paged cache with their own."""

from __future__ import annotations

from tests.interop.families import torch, transformers

VOCABULARY, EOS = 61, 60
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": False,  # tied, random weights repeat the last token
}
CONFIGS = {
    "whisper": _COMMON | _STACKS | {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64},
    "bart": _COMMON | _STACKS | {"max_position_embeddings": 64, "forced_eos_token_id": None},
    "t5": _COMMON
    | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    | {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
}
CLASSES = {"whisper": "Whisper", "bart": "Bart", "t5": "T5"}


def make_config(family):
    fields = CONFIGS[family]
    return getattr(transformers, f"{CLASSES[family]}Config")(**fields)


def make_model(family, dtype="float32"):
    torch.manual_seed(0 if family == "t5" else 4)
    model = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")(make_config(family))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed_positions" not in name:
                # Initial weights give flat attention, which hides mistakes.
                is_sharp = "encoder_attn.q" in name or "encoder_attn.k" in name
                weight.mul_(8.0 if is_sharp else 2.0)
            if weight.ndim == 3:  # the convolutions of a Whisper, whose input positions would drown out
                weight.mul_(10.0)
    return model.to(getattr(torch, dtype)).eval()


def inputs_of(family, rows=2, seed=0):
    """Return the arguments of `generate`: features for Whisper, else ids padded at either end."""
    torch.manual_seed(seed)
    if family == "whisper":
        return {"input_features": torch.randn(rows, 8, 100)}
    ids = torch.randint(3, EOS, (rows, 21))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
        mask[row, 21 - row :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
