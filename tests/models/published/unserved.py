"""Published configs whose attention no spec describes, with the reason in the error message."""

UNSERVED = {
    "minimax-m3": (
        {
            "model_type": "minimax_m3_vl_text",
            "head_dim": 128,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_hidden_layers": 60,
            "num_key_value_heads": 4,
            "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57},
        },
        "sparse attention to blocks of keys (sparse_attention_config = ...)",
    ),
}
