"""Rows next to attention: compressed latents and keys of indexers, as transformers and vLLM store them."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    LatentSpec,
    PagedKVCache,
    Plane,
    RowSpec,
    ShapeError,
    StateSpec,
    TensorParallel,
    UnsupportedOption,
)
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.parameters import count_parameters, mtp_specs
from pagecore.serving.planner import plan_model
from pagecore.serving.replay.options import ReplayOptions
from tests.capabilities import require
from tests.passing import passing

# The fields of deepseek-ai/DeepSeek-V4-Flash that decide its cache; the last rate is that of a draft.
FLASH = {
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
}
TINY = {"model_type": "deepseek_v4", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
TINY |= {"head_dim": 16, "index_head_dim": 8, "sliding_window": 8}
TINY["layer_types"] = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
TINY["compress_rates"] = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6}
MINIMAX = {"model_type": "minimax_m3_vl_text", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 4}
QWEN_4 = {"model_type": "qwen4_exp_text", "hidden_size": 2048, "num_hidden_layers": 4, "indexer_n_heads": 4}
QWEN_4 |= {"indexer_head_dim": 128, "indexer_compress_ratio": 4}
STEP_5 = {"model_type": "step5", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 2}
STEP_5 |= {"num_attention_groups": 8, "head_dim": 128, "sliding_window": 512, "num_nextn_predict_layers": 1}
STEP_5 |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sparse_config": {}}


def shapes(spec):
    return {plane.name: (plane.shape, str(plane.dtype), plane.per) for plane in spec.planes}


# -- Qwen3.8-Flash-Next, whose type exports name in two ways -----------------------------------------------------------


def test_qwen_flash_next_under_both_names():
    text = QWEN_4 | {"hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2}
    text |= {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "ple_layer_ids": [2]}
    text |= {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 12, "ple_embed_dim": 2560}
    text |= {"indexer_kv_heads": 1, "num_experts": 512, "moe_intermediate_size": 640, "vocab_size": 248320}
    text |= {"shared_expert_intermediate_size": 640, "hc_lowrank": 320, "heads_per_ngram": 8, "num_experts_per_tok": 10}
    text |= {"ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128}
    named = text | {"model_type": "qwen3_8_flash_next_text"}
    specs = specs_from_config({"model_type": "qwen3_8_flash_next", "text_config": named})
    assert specs == specs_from_config({"model_type": "qwen4_exp", "text_config": text})
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    assert (len(attention), attention[0].num_kv_heads, attention[0].head_dim) == (12, 2, 256)
    # A mean key of 128 numbers for each 4 tokens, next to the keys and values.
    assert plan_model(named, "8GiB").memory.bytes_per_token == 12 * (2 * 2 * 256 * 2 + 128 * 2 / 4)
    assert count_parameters(named).total == count_parameters(text).total


# -- DeepSeek-V4 -------------------------------------------------------------------------------------------------------


def test_layers_of_deepseek_v4():
    model = read_model_config(FLASH)
    by_layer = [[model.layers[number] for number in numbers] for numbers in model.specs_by_layer]
    assert [len(specs) for specs in by_layer] == [1, 1, *[3] * 41]
    window = LatentSpec(512, 0, 64, scale=512**-0.5, window=128)
    assert {specs[0] for specs in by_layer} == {window}
    _, sparse, ring = by_layer[2]
    assert shapes(sparse) == {
        "latent": ((32, 512), "bfloat16", "block"),
        "index_key": ((32, 128), "float8_e4m3fn", "block"),
        "index_scale": ((32, 1), "float32", "block"),
    }
    # vLLM stores eight tokens of 2 * 2 * 512 and 2 * 2 * 128 float32 numbers.
    assert shapes(ring) == {
        "state": ((8, 2048), "float32", "sequence"),
        "index_state": ((8, 512), "float32", "sequence"),
    }
    _, heavy, ring = by_layer[3]
    assert shapes(heavy) == {"latent": ((1, 512), "bfloat16", "block")}
    assert shapes(ring) == {"state": ((128, 1024), "float32", "sequence")}
    assert ring.shard(TensorParallel(1, 4)).planes == ring.planes


def test_the_cache_of_a_small_deepseek_v4():
    transformers, torch = require("transformers"), require("torch")
    if "deepseek_v4" not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no deepseek_v4")
    sizes = {"q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 99, "moe_intermediate_size": 16, "index_n_heads": 2, "index_topk": 4, "hc_mult": 2}
    config = transformers.AutoConfig.for_model(**TINY, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    built = transformers.AutoModel.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        built(torch.randint(3, 90, (1, 23)), **passing(cache))
    model = read_model_config(config.to_dict())
    for layer, numbers in zip(cache.layers, model.specs_by_layer, strict=True):
        window, *others = (model.layers[number] for number in numbers)
        assert (window.latent_dim, window.window) == (layer.keys.shape[-1], layer.sliding_window)
        compressed = getattr(layer, "compressed_kv", {})
        assert bool(compressed) == bool(others)
        for name, plane in (("compressor", "latent"), ("indexer", "index_key")):
            if name in compressed:
                rows, ring = others
                assert compressed[name].shape[1:] == (23 // rows.tokens, shapes(rows)[plane][0][1])
                state = shapes(ring)["state" if name == "compressor" else "index_state"][0]
                open_tokens = layer.buffer_kv[name].shape[1] + rows.tokens * (name in getattr(layer, "overlap_kv", {}))
                assert open_tokens <= state[0]
                assert state[1] == 2 * layer.buffer_kv[name].shape[2]


def test_packed_rows_of_deepseek_v4():
    specs = specs_from_config(FLASH, format="fp8_ds_mla")
    assert shapes(specs[0]) == {"latent": ((584,), "uint8", "token")}
    assert specs[0].window == 128
    assert shapes(specs[3])["latent"] == ((32, 584), "uint8", "block")
    quantised = specs_from_config(FLASH, format="float8_e4m3fn")
    assert (quantised[0].format, shapes(quantised[3])["latent"][1]) == ("float8_e4m3fn", "float8_e4m3fn")
    with pytest.raises(ConfigError, match="head_dim is 256; rows of 'fp8_ds_mla' have 512 numbers"):
        specs_from_config(FLASH | {"head_dim": 256}, format="fp8_ds_mla")


def test_sources_of_deepseek_v41():
    text = {name: value for name, value in FLASH.items() if name != "sliding_window"} | {"window_size": 256}
    text |= {"num_hidden_layers": 6, "compress_ratios": [0, 1, 1, 2, 2, 128, 0], "model_type": "deepseek_v41_text"}
    text |= {"kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 2]}
    model = read_model_config({"model_type": "deepseek_v41", "text_config": text})
    kinds = [[type(model.layers[number]) for number in numbers] for numbers in model.specs_by_layer]
    assert kinds == [
        [LatentSpec],
        [LatentSpec, RowSpec],
        [LatentSpec],
        [LatentSpec, RowSpec, StateSpec],
        *[[LatentSpec]] * 2,
    ]
    assert shapes(model.layers[2]) == {
        "latent": ((512,), "bfloat16", "token"),
        "index_key": ((128,), "float8_e4m3fn", "token"),
        "index_scale": ((1,), "float32", "token"),
    }
    assert shapes(model.layers[5]) == {"latent": ((64, 512), "bfloat16", "block")}
    assert shapes(model.layers[6]) == {"state": ((2, 1024), "float32", "sequence")}
    assert model.layers[0].window == 256
    assert read_model_config(text | {"model_type": "deepseek_v41"}).layers == model.layers


def test_a_plan_of_deepseek_v4_uses_the_blocks_that_its_rows_need():
    plan = plan_model(FLASH, "40GiB", format="fp8_ds_mla")
    assert plan.memory.block_size == 128
    assert [group.bytes_per_block for group in plan.memory.groups] == [
        43 * 128 * 584,
        21 * 32 * (584 + 128 + 4),
        20 * 584,
    ]
    assert plan.memory.states.bytes_per_slot == 4 * (21 * 8 * (2048 + 512) + 20 * 128 * 1024)
    assert plan_model(FLASH, "40GiB", block_size=256).memory.block_size == 256
    with pytest.raises(ShapeError, match="block_size is 16, and a row belongs to 128 tokens; give the block size"):
        plan_model(FLASH, "40GiB", block_size=16)


def test_a_replay_of_deepseek_v4_has_rows_for_its_blocks():
    rows = ReplayOptions(memory="40GiB", model=FLASH, block_size=512).layers[3]
    assert (rows.block_size, shapes(rows)["latent"][0]) == (512, (128, 512))
    with pytest.raises(ShapeError, match="block_size is 16, and a row belongs to 128 tokens"):
        ReplayOptions(memory="40GiB", model=FLASH)


@pytest.mark.parametrize("format", [None, "fp8_ds_mla"])
def test_the_draft_of_deepseek_v4_has_a_window(format):
    layers = specs_from_config(FLASH, format=format)
    assert mtp_specs(FLASH, layers) == (layers[0],)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"compress_ratios": [4] * 42}, ConfigError, "must have an entry for each of 43 layers"),
        ({"compress_ratios": [8] * 43}, UnsupportedOption, r"compress_ratios\[0\] is 8; expected 0 or 4 or 128 or 1"),
        ({"compress_ratios": [True] * 43}, UnsupportedOption, r"compress_ratios\[0\] is true"),
        ({"layer_types": ["full_attention"] * 43}, UnsupportedOption, r"layer_types\[0\] is \"full_attention\""),
        ({"num_key_value_heads": 8}, ConfigError, "num_key_value_heads is 8; it must be 1"),
        ({"kv_source_layer_ids": 3}, ConfigError, "kv_source_layer_ids is 3; it must be a list of integers"),
    ],
)
def test_fields_of_deepseek_v4_that_do_not_fit_are_named(changes, error, reason):
    with pytest.raises(error, match=reason):
        specs_from_config(FLASH | changes)


def test_default_layers_are_those_of_transformers():
    transformers = require("transformers")
    if "deepseek_v4" not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no deepseek_v4")
    fewest = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 7, "model_type": "deepseek_v4"}
    written = transformers.AutoConfig.for_model(**fewest).to_dict()
    assert specs_from_config(fewest, dtype="float32") == specs_from_config(written, dtype="float32")


# -- indexers ----------------------------------------------------------------------------------------------------------


def test_index_keys_of_minimax_m3():
    sparse = {"sparse_attention_freq": [0, 1, 1, 0], "sparse_index_dim": 64}
    model = read_model_config(MINIMAX | {"sparse_attention_config": sparse})
    assert [len(numbers) for numbers in model.specs_by_layer] == [1, 2, 2, 1]
    assert shapes(model.layers[2]) == {"index_key": ((64,), "bfloat16", "token")}
    named = MINIMAX | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2, "full_attention"]}
    assert specs_from_config(named | {"index_head_dim": 64}) == list(model.layers)
    assert len(specs_from_config(MINIMAX)) == 4
    for listed in ([1], [[1], 0, 0, 0]):
        with pytest.raises(ConfigError, match=r"sparse_attention_freq is \[.*; it must list 'full_attention' or"):
            specs_from_config(MINIMAX | {"sparse_attention_config": {"sparse_attention_freq": listed}})


def test_grouped_index_keys_of_qwen_4():
    model = read_model_config(QWEN_4)
    assert [len(numbers) for numbers in model.specs_by_layer] == [1, 1, 1, 3]
    assert shapes(model.layers[4]) == {"index_key": ((4, 128), "bfloat16", "block")}
    assert shapes(model.layers[5]) == {"index_state": ((4, 128), "bfloat16", "sequence")}
    assert shapes(specs_from_config(QWEN_4, block_size=64)[4]) == {"index_key": ((16, 128), "bfloat16", "block")}
    assert plan_model(QWEN_4, "1GiB").memory.block_size == 16
    with pytest.raises(ConfigError, match="indexer_compress_ratio is 5; it must divide 64"):
        specs_from_config(QWEN_4 | {"indexer_compress_ratio": 5})


def test_convolutions_of_ngrams_of_qwen_4():
    specs = [spec for spec in specs_from_config(QWEN_4 | {"ple_layer_ids": [2]}) if "conv" in shapes(spec)]
    assert [[*shapes(spec)] for spec in specs] == [
        ["conv", "temporal"],
        ["conv", "temporal", "ngram_conv"],
        ["conv", "temporal"],
    ]
    # vLLM keeps (4 - 1) * 3 inputs of 4 * 2,048 channels on every rank.
    assert shapes(specs[1])["ngram_conv"] == ((8192, 9), "bfloat16", "sequence")
    assert shapes(specs[1].shard(TensorParallel(0, 2)))["ngram_conv"] == ((8192, 9), "bfloat16", "sequence")
    for numbers in ([4], [0], [5], 3, ["1"]):
        with pytest.raises(ConfigError, match=r"ple_layer_ids is .*; it must "):
            specs_from_config(QWEN_4 | {"ple_layer_ids": numbers})


def test_summaries_of_step_5():
    model = read_model_config(STEP_5)
    assert [len(numbers) for numbers in model.specs_by_layer] == [3, 1]
    attention, rows, ring, slides = model.layers
    assert (attention.num_kv_heads, attention.window, slides.window) == (8, None, 512)
    assert shapes(rows) == {"index_summary": ((2, 256), "float8_e4m3fn", "block")}
    assert shapes(ring) == {"index_state": ((8, 512), "bfloat16", "sequence")}
    off = specs_from_config(STEP_5 | {"sparse_config": {"enabled": False}})
    assert off == specs_from_config({name: value for name, value in STEP_5.items() if name != "sparse_config"})
    assert len(specs_from_config({"model_type": "step5_vl", "text_config": STEP_5})) == 4


# -- the spec, and a cache ---------------------------------------------------------------------------------------------

ROW = Plane("latent", (4,), "float32")


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"rows": ()}, UnsupportedOption, "rows is empty"),
        ({"rows": (Plane("latent", (4,), "float32", per="block"),)}, UnsupportedOption, "expected a Plane per token"),
        ({"rows": (7,)}, UnsupportedOption, "rows has 7; expected a Plane per token"),
        ({"tokens": 0}, ShapeError, "tokens is 0"),
        ({"tokens": 4}, ShapeError, "block_size is None, and a row belongs to 4 tokens"),
        ({"tokens": 4, "block_size": 6}, ShapeError, "block_size is 6, and a row belongs to 4 tokens"),
        ({"window": 0}, ShapeError, "window is 0"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(arguments, error, reason):
    with pytest.raises(error, match=reason):
        RowSpec(**({"rows": (ROW,)} | arguments))


def test_a_cache_stores_rows_and_copies_them_on_write():
    spec = RowSpec((ROW,), tokens=2, block_size=4)
    with pytest.raises(ShapeError, match="block_size is 16, but the RowSpec is made for blocks of 4 tokens"):
        PagedKVCache([spec], num_blocks=4, block_size=16)
    cache = PagedKVCache([spec], num_blocks=8, block_size=4)
    sequence = cache.add_sequence([1, 2, 3])
    cache.commit(cache.prepare([sequence], [3]))
    rows = np.asarray(cache.plane("latent", 0))
    first = np.asarray(cache.block_table(0))[0, 0]
    rows[first] = np.arange(8).reshape(2, 4)
    fork = cache.fork(sequence)
    cache.commit(cache.prepare([fork], [1]))
    own = np.asarray(cache.block_table(0))[1, 0]
    assert own != first
    assert np.array_equal(rows[own], np.arange(8).reshape(2, 4))
