"""Parameters of families that vLLM or SGLang serve and transformers does not have, computed by hand."""

import pytest

from pagecore.models.parameters import count_parameters

# Both are as the engines build their layers. The model card of IQuest-Q1 has about 320B parameters.
IQUEST = {"model_type": "iquest_q1", "vocab_size": 160000, "hidden_size": 3072, "dense_intermediate_size": 12288}
IQUEST |= {"intermediate_size": 1536, "num_hidden_layers": 88, "num_attention_heads": 48, "num_key_value_heads": 8}
IQUEST |= {"head_dim": 128, "num_experts": 256}
DOMYN = {"model_type": "domyn_edge", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 72}
DOMYN |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


def test_iquest_q1_has_sinks_and_three_norms():
    attention = 2 * 3072 * 48 * 128 + 2 * 3072 * 8 * 128 + 2 * 128
    layer = attention + 3 * 3072
    dense, experts = 3 * 3072 * 12288, 256 * (3 * 3072 * 1536 + 3072)
    sinks, last_of_first, ends = 8 * 128, 3072, 2 * 160000 * 3072 + 3072
    total = 88 * (layer + sinks) + dense + 87 * experts + last_of_first + ends
    assert total == 320_318_615_552
    assert count_parameters(IQUEST).total == total
    without = count_parameters(IQUEST | {"enable_sink_attention": False}).total
    assert without == total - 88 * sinks
    every = count_parameters(IQUEST | {"mlp_only_layers": None}).total
    assert every == total - dense + experts


@pytest.mark.parametrize("tied", [False, True])
def test_domyn_edge_has_four_norms_and_one_of_keys(tied):
    config = DOMYN | {"per_layer_config": {"1": {"head_dim": 24}}, "tie_word_embeddings": tied}
    attention = sum(2 * 64 * 8 * dim + 2 * 64 * 2 * dim + dim for dim in (16, 24, 16))
    layers = attention + 3 * (3 * 64 * 72 + 4 * 64)
    assert count_parameters(config).total == layers + (2 - tied) * 101 * 64 + 64
