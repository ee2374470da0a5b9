"""Llama 4: layers with rotary embeddings attend in chunks, every fourth layer to all keys."""

import pytest

from pagecore import AttentionSpec, ConfigError, UnsupportedOption, specs_from_config
from pagecore.models import read_model_config
from pagecore.serving.planner import plan_model
from tests.models.published import LLAMA_4_SCOUT

TEXT = LLAMA_4_SCOUT["text_config"]


def chunks(**fields):
    return [spec.chunk for spec in specs_from_config(TEXT | fields)]


def test_layers_of_llama_4_scout():
    model = read_model_config(LLAMA_4_SCOUT)
    assert (model.model_type, model.max_length) == ("llama4_text", 10485760)
    chunked = AttentionSpec(8, 128, num_query_heads=40, chunk=8192)
    full = AttentionSpec(8, 128, num_query_heads=40)
    assert list(model.layers) == [chunked, chunked, chunked, full] * 12


def test_the_layers_with_chunks_may_be_listed():
    assert chunks(no_rope_layers=[0, 1] * 24) == [None, 8192] * 24
    assert chunks(no_rope_layer_interval=2, attention_chunk_size=64) == [64, None] * 24
    listed = ["full_attention"] * 12 + ["chunked_attention"] * 36
    assert chunks(layer_types=listed) == [None] * 12 + [8192] * 36
    assert chunks(layer_types=["full_attention"] * 48, attention_chunk_size=None) == [None] * 48


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"no_rope_layers": [1] * 47}, ConfigError, "no_rope_layers is"),
        ({"no_rope_layers": [2] * 48}, ConfigError, "no_rope_layers is"),
        (
            {"attention_chunk_size": None},
            ConfigError,
            "layer 0 is 'chunked_attention', but attention_chunk_size is null",
        ),
        ({"attention_chunk_size": 0}, ConfigError, "attention_chunk_size"),
        ({"layer_types": ["sliding_attention"] * 48}, UnsupportedOption, "layer_types.0. is .sliding_attention."),
        ({"sliding_window": 4096}, UnsupportedOption, "sliding_window is 4096"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        specs_from_config(TEXT | fields)


def test_the_plan_counts_a_chunk():
    plan = plan_model(LLAMA_4_SCOUT, "40GiB", context=[4096, 131072]).memory
    assert [group.as_json()["chunk"] for group in plan.groups] == [8192, None]
    assert plan.contexts[0].blocks_per_request == (256, 256)
    assert plan.contexts[1].blocks_per_request == (512, 8192)
