"""Write encoders.json, parameters of small models with encoders, and of Inkling, that transformers builds.

Run manually, with torch and transformers installed:

    python -m tests.models.record_encoders

The sizes are such that no two fields of a part have the same value by chance. Every model is built on torch's meta
device.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("encoders.json")
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4}
TOWER = {**LAYERS, "hidden_size": 32, "intermediate_size": 56, "patch_size": 14}
LLAMA = {**LAYERS, "hidden_size": 48, "intermediate_size": 88, "vocab_size": 101, "num_key_value_heads": 2}
GRANITE = {"text_config": LLAMA | {"model_type": "granite"}}
KOSMOS = {"embed_dim": 48, "layers": 2, "ffn_dim": 88, "attention_heads": 4, "vocab_size": 101}
CONFORMER = {"hidden_dim": 24, "num_layers": 3, "num_heads": 2, "dim_head": 10, "feedforward_mult": 3}
CONFORMER |= {"conv_expansion_factor": 5, "conv_kernel_size": 7, "max_pos_emb": 9, "context_size": 8}
CONFORMER |= {"input_dim": 14, "output_dim": 6}
Q_FORMER = {"model_type": "blip_2_qformer", "hidden_size": 20, "num_hidden_layers": 5, "intermediate_size": 44}
Q_FORMER |= {"num_attention_heads": 4, "cross_attention_frequency": 3, "encoder_hidden_size": 24}
SPEECH = {"projector_config": Q_FORMER, "window_size": 13, "downsample_rate": 4, "encoder_config": CONFORMER, **GRANITE}
WHISPER = {**LAYERS, "hidden_size": 32, "intermediate_size": 56, "num_mel_bins": 16}
PARAKEET = {**LAYERS, "hidden_size": 24, "intermediate_size": 60, "num_mel_bins": 32, "conv_kernel_size": 5}
PARAKEET |= {"subsampling_conv_channels": 8, "subsampling_factor": 8}
BERT = {**LAYERS, "hidden_size": 48, "intermediate_size": 76, "vocab_size": 101, "max_position_embeddings": 37}
DECODER = BERT | {"num_key_value_heads": 2, "head_dim": 10}
GEMMA = LLAMA | {"head_dim": 10}
INKLING = LLAMA | {"head_dim": 12, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
INKLING |= {"moe_intermediate_size": 20, "n_routed_experts": 5, "num_experts_per_tok": 2, "d_rel": 7}
INKLING |= {"rel_extent": 11, "sliding_window_size": 9, "conv_kernel_size": 3}
INKLING |= {"layer_types": ["hybrid_sliding", "hybrid", "hybrid"]}
CASES = [
    ("blip", {"vision_config": TOWER | {"image_size": 56}, "text_config": BERT | {"encoder_hidden_size": 32}}),
    ("canary", {"encoder_config": PARAKEET, "decoder_config": DECODER | {"hidden_size": 24}, "vocab_size": 101}),
    ("canary", {"encoder_config": PARAKEET | {"attention_bias": False}, "decoder_config": DECODER, "vocab_size": 101}),
    ("cohere_asr", DECODER | {"encoder_config": PARAKEET | {"convolution_bias": False}}),
    ("cohere_asr", DECODER | {"encoder_config": PARAKEET, "tie_word_embeddings": True}),
    (
        "fun_asr_nano",
        {
            "audio_config": WHISPER
            | {"fsmn_kernel_size": 5, "num_stacked_frames": 3, "num_timestamp_prediction_layers": 1},
            "adaptor_config": {**LAYERS, "projector_hidden_size": 30, "hidden_size": 48, "intermediate_size": 12},
            "text_config": LLAMA | {"model_type": "qwen3"},
        },
    ),
    (
        "granite_docling",
        {
            "vision_config": TOWER
            | {"image_size": 56, "out_hidden_size": 48, "deepstack_visual_indexes": [0, 1], "scale_factor": 4},
            "text_config": LLAMA | {"model_type": "granite_docling_text"},
        },
    ),
    (
        "granite_docling",
        {
            "vision_config": TOWER
            | {"image_size": 56, "out_hidden_size": 48, "deepstack_visual_indexes": [1], "use_fine_route": False},
            "text_config": LLAMA | {"model_type": "granite_docling_text"},
        },
    ),
    ("granite_speech", SPEECH),
    ("granite_speech_plus", SPEECH),
    ("inkling_text", INKLING | {"n_shared_experts": 3}),
    ("inkling_text", INKLING | {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    ("inkling2_text", INKLING),
    ("kosmos-2", {"vision_config": TOWER | {"image_size": 56}, "text_config": KOSMOS, "latent_query_num": 7}),
    (
        "kosmos-2.5",
        {
            "vision_config": TOWER | {"max_num_patches": 9, "patch_embed_hidden_size": 588, "head_dim": 8},
            "text_config": KOSMOS,
            "latent_query_num": 7,
        },
    ),
    (
        "lfm3_vl",
        {
            "vision_config": TOWER
            | {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"], "conv_kernel_size": 5},
            "text_config": LLAMA | {"model_type": "lfm3"},
            "projector_hidden_size": 40,
        },
    ),
    (
        "moss_transcribe_diarize",
        {
            "audio_config": WHISPER | {"max_source_positions": 30},
            "text_config": LLAMA | {"model_type": "qwen3"},
            "audio_merge_size": 3,
        },
    ),
    ("speecht5", {"hidden_size": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 60}),
    (
        "t5gemma2",
        {
            "encoder": {"text_config": GEMMA, "vision_config": TOWER | {"image_size": 56}},
            "decoder": GEMMA | {"num_hidden_layers": 2},
            "vocab_size": 101,
        },
    ),
    (
        "voxtral_realtime",
        {
            "audio_config": WHISPER | {"head_dim": 10},
            "text_config": LLAMA | {"model_type": "voxtral_realtime_text"},
            "downsample_factor": 3,
        },
    ),
]


def record():
    import torch
    import transformers
    from transformers.models.auto import modeling_auto as auto

    cases = []
    for model_type, sizes in CASES:
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        for part in (config, config.get_text_config()):
            part.pad_token_id = 0
        kinds = ("MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
        maps = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds]
        name = next(each[model_type] for each in maps if model_type in each)
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        cases.append({"config": json.loads(config.to_json_string(use_diff=False)), "parameters": count})
        print(model_type, count, flush=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    record()
