"""A minimal config of each model type, and configs with a window that is switched on or off."""

FEWEST = {"hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 30}
FIXED = ["llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt_oss"]
FIXED += ["gpt2", "glm", "glm4", "glm4_moe", "olmo2", "olmo3", "starcoder2", "cohere", "cohere2", "granite", "seed_oss"]
FIXED += ["minimax_m2", "qwen2_vl", "qwen2_5_vl"]
KIN = ["afmoe", "apertus", "arcee", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "granitemoe"]
KIN += ["granitemoeshared", "internlm3", "jais2", "ministral3", "nanochat", "olmo", "olmoe", "persimmon", "phimoe"]
KIN += ["smollm3", "solar_open", "stablelm", "vaultgemma"]
NESTED = ["glm4v", "qwen3_vl", "qwen3_vl_moe"]
SWITCHED = ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
FEWEST_FIELDS: dict[str, dict[str, object]] = {
    f"the fewest fields of {each}": {"model_type": each, **FEWEST} for each in [*FIXED, *SWITCHED]
}
FEWEST_FIELDS |= {f"the fewest fields of {each}": {"model_type": each, **FEWEST} for each in KIN}
# transformers cannot build these without the fields that are added here.
FEWEST_FIELDS |= {
    "the fewest fields of helium": {"model_type": "helium", **FEWEST, "hidden_size": 2560, "num_attention_heads": 20},
    "the fewest fields of hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 128, **FEWEST},
    "the fewest fields of nemotron": {"model_type": "nemotron", "num_key_value_heads": 8, "head_dim": 96, **FEWEST},
    "smollm3 with its window on": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 512,
        **FEWEST,
    },
    "exaone4 without a window": {
        "model_type": "exaone4",
        "layer_types": ["full_attention"] * 30,
        "sliding_window": None,
        **FEWEST,
    },
}
# transformers counts the heads of a family with latent attention by num_key_value_heads.
LATENT = ["deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "minicpm3", "mistral4", "youtu"]
FEWEST_FIELDS |= {
    f"the fewest fields of {each}": {"model_type": each, **FEWEST, "num_key_value_heads": 32} for each in LATENT
}
# transformers cannot build a Ministral without head_dim.
FEWEST_FIELDS["the fewest fields of ministral"] = {"model_type": "ministral", "head_dim": 128, **FEWEST}
FEWEST_FIELDS |= {
    f"{each} with its window on": {"model_type": each, "use_sliding_window": True, **FEWEST} for each in SWITCHED
}
FEWEST_FIELDS |= {
    f"the fewest fields of {each}": {"model_type": each, "text_config": {"model_type": f"{each}_text", **FEWEST}}
    for each in NESTED
}
