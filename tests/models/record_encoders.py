"""Write encoders.json, parameters of small models with encoders, and of Inkling, that transformers builds.

Run manually, with torch and transformers installed:

    python -m tests.models.record_encoders

The sizes are such that no two fields of a part have the same value by chance. Every model is built on torch's meta
device.
"""

import json
from pathlib import Path

from tests.models.meta import on_meta_device

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
QWEN = LLAMA | {"model_type": "qwen3_5_text", "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10}
QWEN |= {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
INKLING = LLAMA | {"head_dim": 12, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
INKLING |= {"moe_intermediate_size": 20, "n_routed_experts": 5, "num_experts_per_tok": 2, "d_rel": 7}
INKLING |= {"rel_extent": 11, "sliding_window_size": 9, "conv_kernel_size": 3}
INKLING |= {"layer_types": ["hybrid_sliding", "hybrid", "hybrid"]}
SAM = {**LAYERS, "hidden_size": 24, "mlp_dim": 44, "image_size": 64, "patch_size": 8, "window_size": 3}
SAM |= {"output_channels": 6, "global_attn_indexes": [1]}
SEAMLESS = {"hidden_size": 48, "vocab_size": 101, "max_position_embeddings": 37, "decoder_ffn_dim": 76}
SEAMLESS |= {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEAMLESS |= {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 60}
SEAMLESS |= {"feature_projection_input_dim": 14, "conv_depthwise_kernel_size": 5, "adaptor_kernel_size": 3}
FLORENCE = {"depths": [1, 2], "embed_dim": [8, 20], "patch_size": [5, 3], "patch_prenorm": [False, True]}
FLORENCE |= {"num_heads": [2, 2], "num_groups": [2, 2], "patch_stride": [4, 2], "patch_padding": [3, 1]}
FLORENCE |= {"projection_dim": 48, "max_position_embeddings": 9, "mlp_ratio": 3.0}
BART = {"model_type": "bart", "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 60}
BART |= {"decoder_ffn_dim": 76, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 101}
BART |= {"max_position_embeddings": 37}
T5 = {"d_model": 48, "d_kv": 10, "d_ff": 76, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
MAMBA = LLAMA | {"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 12}
MAMBA |= {"layers_block_type": ["mamba", "attention", "moe"], "moe_intermediate_size": 20, "n_routed_experts": 5}
RADIO = {**LAYERS, "hidden_size": 32, "patch_size": 14, "max_img_size": 56, "num_cls_tokens": 2, "num_registers": 3}
RADIO |= {"video_temporal_patch_size": 2}
TROCR = {"model_type": "trocr", "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 101}
TROCR |= {"decoder_ffn_dim": 76, "max_position_embeddings": 37}
CROSSED = {"is_decoder": True, "add_cross_attention": True}
BERT_DECODER, ROBERTA_DECODER = (BERT | CROSSED | {"model_type": name} for name in ("bert", "roberta"))
GPT_2 = CROSSED | {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 37, "vocab_size": 101}
SWIN = {"model_type": "donut-swin", "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 3}
SWIN |= {"image_size": [32, 48], "mlp_ratio": 3.0}
WAV2VEC2 = {**LAYERS, "model_type": "wav2vec2", "hidden_size": 32, "intermediate_size": 56, "conv_dim": [6, 10]}
WAV2VEC2 |= {"conv_kernel": [5, 3], "conv_stride": [2, 2], "num_conv_pos_embeddings": 12}
WAV2VEC2 |= {"num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2}
IDEFICS = {**LAYERS, "embed_dim": 32, "intermediate_size": 56, "patch_size": 14, "image_size": 56}
RESAMPLER = {"resampler_depth": 3, "resampler_n_heads": 5, "resampler_head_dim": 7, "resampler_n_latents": 9}
RESAMPLER |= {"qk_layer_norms_perceiver": True}
VIT = TOWER | {"image_size": 56}
BEIT = {"model_type": "beit", "hidden_size": 48, "use_mask_token": True, "use_absolute_position_embeddings": True}
BEIT |= {"use_relative_position_bias": True, "use_shared_relative_position_bias": True, "use_mean_pooling": False}
BEIT |= {"layer_scale_init_value": 0.0}
LAYER_NORMS = {"feat_extract_norm": "layer", "conv_bias": True, "num_feat_extract_layers": 2}
# Models that no class of AutoModel generates with.
OTHERS = {"glm_image": "GlmImageForConditionalGeneration"}
CASES = [
    (
        "audioflamingo3",
        {"audio_config": WHISPER, "text_config": LLAMA | {"model_type": "qwen2"}, "projector_bias": False},
    ),
    ("blip", {"vision_config": TOWER | {"image_size": 56}, "text_config": BERT | {"encoder_hidden_size": 32}}),
    ("canary", {"encoder_config": PARAKEET, "decoder_config": DECODER | {"hidden_size": 24}, "vocab_size": 101}),
    ("canary", {"encoder_config": PARAKEET | {"attention_bias": False}, "decoder_config": DECODER, "vocab_size": 101}),
    ("cohere_asr", DECODER | {"encoder_config": PARAKEET | {"convolution_bias": False}}),
    ("cohere_asr", DECODER | {"encoder_config": PARAKEET, "tie_word_embeddings": True}),
    (
        "cosmos3_edge",
        {
            "vision_config": TOWER | {"patch_size": 8, "num_patches": 25},
            "text_config": LLAMA | {"mlp_bias": True},
            "projector_hidden_size": 36,
        },
    ),
    (
        "deepseek_vl_hybrid",
        {
            "vision_config": TOWER | {"image_size": 56},
            "high_res_vision_config": SAM,
            "text_config": LLAMA | {"model_type": "llama"},
        },
    ),
    ("florence2", {"vision_config": FLORENCE, "text_config": BART}),
    ("florence2", {"vision_config": FLORENCE | {"qkv_bias": False}, "text_config": BART}),
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
        "glm_image",
        {
            "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4, "image_size": 56}
            | {"patch_size": 14, "attention_bias": False},
            "text_config": LLAMA | {"vision_vocab_size": 70, "attention_bias": False},
            "vq_config": {"embed_dim": 12, "num_embeddings": 40, "latent_channels": 20},
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
    (
        "granite_docling",
        {
            "vision_config": TOWER | {"image_size": 56, "out_hidden_size": 48, "deepstack_visual_indexes": []},
            "text_config": LLAMA | {"model_type": "granite_docling_text"},
            "density_router_hidden_size": 20,
        },
    ),
    ("granite_speech", SPEECH),
    ("granite_speech_plus", SPEECH),
    ("idefics", LLAMA | {"num_key_value_heads": 4, "vision_config": IDEFICS, "perceiver_config": {}}),
    (
        "idefics",
        LLAMA
        | {"num_key_value_heads": 4, "num_hidden_layers": 5, "cross_layer_interval": 2, "alpha_type": "vector"}
        | {"additional_vocab_size": 7, "qk_layer_norms": True, "use_resampler": True, "vision_config": IDEFICS}
        | {"perceiver_config": RESAMPLER},
    ),
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
        "minicpm_ocr",
        {"vision_config": TOWER | {"image_size": 56, "insert_layer_id": 1}, "text_config": QWEN},
    ),
    (
        "muse_glimmer",
        {
            "vision_config": TOWER | {"pos_emb_height": 5, "pos_emb_width": 3, "layer_types": ["full_attention"] * 3},
            "text_config": LLAMA | {"model_type": "muse_glimmer_text", "head_dim": 12, "attention_bias": True},
            "out_hidden_size": 128,
            "projector_hidden_size": 40,
        },
    ),
    ("nemotron_h_omni", {"vision_config": RADIO, "text_config": MAMBA, "projector_hidden_size": 40}),
    (
        "moss_transcribe_diarize",
        {
            "audio_config": WHISPER | {"max_source_positions": 30},
            "text_config": LLAMA | {"model_type": "qwen3"},
            "audio_merge_size": 3,
        },
    ),
    ("seamless_m4t", SEAMLESS),
    ("seamless_m4t", SEAMLESS | {"position_embeddings_type": "rotary", "num_adapter_layers": 2}),
    ("seamless_m4t_v2", SEAMLESS | {"left_max_position_embeddings": 9, "right_max_position_embeddings": 4}),
    ("speecht5", {"hidden_size": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 60}),
    ("speecht5", {"hidden_size": 48, "conv_dim": [6, 10], "conv_kernel": [5, 3], "conv_stride": [2, 2]} | LAYER_NORMS),
    (
        "t5gemma2",
        {
            "encoder": {"text_config": GEMMA, "vision_config": TOWER | {"image_size": 56}},
            "decoder": GEMMA | {"num_hidden_layers": 2},
            "vocab_size": 101,
        },
    ),
    ("udop", T5 | {"vocab_size": 101, "max_2d_position_embeddings": 20, "relative_attention_num_buckets": 8}),
    ("udop", T5 | {"vocab_size": 101, "feed_forward_proj": "gated-gelu", "relative_bias_args": [{"type": "1d"}]}),
    (
        "video_llava",
        {"vision_config": TOWER | {"image_size": 56}, "text_config": LLAMA | {"model_type": "llama"}},
    ),
    (
        "vision-encoder-decoder",
        {
            "encoder": VIT | {"model_type": "deit", "qkv_bias": False},
            "decoder": TROCR | {"cross_attention_hidden_size": 32},
        },
    ),
    ("vision-encoder-decoder", {"encoder": VIT | {"model_type": "vit", "hidden_size": 48}, "decoder": TROCR}),
    ("vision-encoder-decoder", {"encoder": VIT | {"model_type": "vit"}, "decoder": TROCR}),
    ("vision-encoder-decoder", {"encoder": VIT | {"model_type": "vit"}, "decoder": GPT_2}),
    ("vision-encoder-decoder", {"encoder": VIT | {"model_type": "beit"}, "decoder": TROCR}),
    ("vision-encoder-decoder", {"encoder": VIT | BEIT, "decoder": TROCR}),
    ("vision-encoder-decoder", {"encoder": SWIN | {"model_type": "swin"}, "decoder": BERT_DECODER}),
    (
        "vision-encoder-decoder",
        {
            "encoder": SWIN | {"use_absolute_embeddings": True, "qkv_bias": False},
            "decoder": BART | {"model_type": "mbart"},
        },
    ),
    ("encoder-decoder", {"encoder": BERT | {"model_type": "bert"}, "decoder": BERT_DECODER}),
    ("encoder-decoder", {"encoder": BERT | {"model_type": "roberta", "hidden_size": 32}, "decoder": ROBERTA_DECODER}),
    ("speech-encoder-decoder", {"encoder": WAV2VEC2, "decoder": BERT_DECODER}),
    ("speech-encoder-decoder", {"encoder": WAV2VEC2 | {"output_hidden_size": 48}, "decoder": BERT_DECODER}),
    (
        "speech-encoder-decoder",
        {"encoder": WAV2VEC2 | {"feat_extract_norm": "layer", "add_adapter": True, "conv_bias": True}, "decoder": BART},
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
    import transformers
    from transformers.models.auto import modeling_auto as auto

    cases = []
    for model_type, sizes in CASES:
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        for part in (config, config.get_text_config()):
            part.pad_token_id = 0
        kinds = ("MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
        maps = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds]
        name = OTHERS.get(model_type) or next(each[model_type] for each in maps if model_type in each)
        with on_meta_device():
            model = getattr(transformers, name)._from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        cases.append({"config": json.loads(config.to_json_string(use_diff=False)), "parameters": count})
        print(model_type, count, flush=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    record()
