"""Layers of Inkling, compared with a cache of transformers that a small model fills."""

import pytest

from pagecore import PagedKVCache, TensorParallel
from pagecore.errors import ShapeError
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.parameters import count_parameters
from tests.capabilities import require
from tests.models.meta import config_for
from tests.passing import passing

SIZES = {"hidden_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "sliding_window_size": 6}
OTHER = {"vocab_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
OTHER |= {"intermediate_size": 32, "unpadded_vocab_size": 64, "conv_kernel_size": 3, "eos_token_id": 2}


LOOP = {"n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 3}
LOOP |= {"loop_gate_rank": 6, "layer_types": ["hybrid_sliding", "hybrid", "hybrid", *["hybrid_sliding"] * 4]}


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("inkling_text", {}),
        ("inkling_text", {"local_layer_ids": [0, 3]}),
        ("inkling2_text", {"n_layers_per_attn_res_block": 2, "intermediate_size": 16}),
        ("inkling2_loop_text", LOOP),
    ],
)
def test_layers_store_what_a_cache_of_transformers_stores(model_type, own):
    transformers, torch = require("transformers"), require("torch")
    config = config_for(model_type, **(SIZES | OTHER | own))
    cache = transformers.DynamicCache(config=config)
    built = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        built(torch.arange(10)[None], **passing(cache))
    model = read_model_config(config.to_dict())
    assert model.max_length == config.max_position_embeddings
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in built.parameters())
    # transformers appends the later passes of a loop to the layers of the model.
    later = len(cache.layers) - config.num_hidden_layers
    layers = [*cache.layers[:4], *cache.layers[7:], *cache.layers[4:7]] if later else cache.layers
    for layer, numbers in zip(layers, model.specs_by_layer, strict=True):
        attention, state = (model.layers[number] for number in numbers)
        _, kv_heads, kept, dim = layer.keys.shape
        assert (attention.num_kv_heads, attention.head_dim, attention.scale) == (kv_heads, dim, 1 / dim)
        assert attention.window == (6 if kept == 5 else None)
        # transformers keeps one input more than a convolution needs.
        shapes = [tuple(each.shape[1:]) for each in layer.conv_states.values()]
        assert [plane.shape for plane in state.planes] == [(width, kept - 1) for width, kept in shapes]


def test_inkling_has_the_defaults_of_transformers():
    transformers = require("transformers")
    for model_type in ("inkling_text", "inkling2_text", "inkling2_loop_text"):
        if model_type not in transformers.CONFIG_MAPPING:
            continue
        written = transformers.AutoConfig.for_model(model_type).to_dict()
        fewest = {name: written[name] for name in ("model_type", "hidden_size", "num_hidden_layers")}
        assert specs_from_config(fewest, dtype="float32") == specs_from_config(written, dtype="float32")
    whole = transformers.AutoConfig.for_model("inkling_mm_model").to_dict()
    text = whole["text_config"] | {"model_type": "inkling_model"}
    assert specs_from_config(whole) == specs_from_config(whole | {"text_config": text})


INKLING = {"model_type": "inkling_text", **SIZES}


def test_ranks_split_keys_and_copy_outputs():
    attention, state = specs_from_config(INKLING)[:2]
    for ranks, widths in ((2, (32, 32, 48, 48)), (8, (16, 16, 48, 48))):
        assert tuple(plane.shape[0] for plane in TensorParallel(0, ranks).shard(state).planes) == widths
    with pytest.raises(ShapeError, match="kv_heads is 4, which 3 ranks can neither split nor replicate"):
        TensorParallel(0, 3).shard(state)
    cache = PagedKVCache(layers=specs_from_config(INKLING), num_blocks=8, block_size=4, num_states=3)
    assert cache.key(0).shape[-2:] == (attention.num_kv_heads, attention.head_dim)
    assert cache.plane("conv_value", 1).shape[1:] == (64, 3)


def test_published_names_of_the_loop():
    own = {"model_type": "inkling2_loop_text", **SIZES, **LOOP}
    renamed = {name: value for name, value in own.items() if not name.startswith("loop_")}
    renamed |= {"loop_config": {"core_start": 2, "core_end": 4, "num_passes": 3, "gate_rank": 6}}
    specs = specs_from_config(own)
    assert specs_from_config(renamed) == specs
    assert [spec.window for spec in specs[::2]] == [6, None, None, 6, None, 6, None, 6, 6, 6, 6]
    whole = {"model_type": "inkling2_loop", "text_config": renamed}
    assert specs_from_config(whole) == specs
    for change, words in (
        ({"core_end": 1}, "the loop is from layer 2 to 1; it must begin before it ends"),
        ({"core_end": 8}, "loop_config.core_end is 8; it must be an integer between 1 and 7"),
        ({"num_passes": 40000}, "the loop has 40000 passes"),
    ):
        with pytest.raises(ConfigError, match=words):
            specs_from_config(renamed | {"loop_config": renamed["loop_config"] | change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_layer_ids": 3}, "local_layer_ids is 3; it must list numbers of layers, or be null"),
        ({"swa_num_key_value_heads": 0}, "swa_num_key_value_heads is 0"),
        ({"conv_kernel_size": 1}, "conv_kernel_size is 1; it must be an integer between 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ],
)
def test_invalid_fields_of_inkling(change, words):
    with pytest.raises(ConfigError, match=words):
        specs_from_config(INKLING | change)
