"""The model of the demo, its dense attention, and its reproducible sampling."""

import numpy as np

from pagecore.serving.demo.model import Model, ModelSizes, dense_attention
from pagecore.serving.demo.sampling import noise, scores
from tests.together import together

SMALL = ModelSizes(vocab_size=64, width=32, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8, window=5)


def attend_by_loops(query, key, value, window):
    """Compute attention with one query and one key at a time."""
    length, heads, dim = query.shape
    group = heads // key.shape[1]
    out = np.zeros_like(query)
    for p in range(length):
        for head in range(heads):
            seen = range(max(0, p - window + 1) if window else 0, p + 1)
            weights = np.array([np.exp(query[p, head] @ key[j, head // group] / np.sqrt(dim)) for j in seen])
            weights /= weights.sum()
            out[p, head] = sum(weight * value[j, head // group] for weight, j in zip(weights, seen, strict=True))
    return out


@together("window", [None, 1, 3, 100])
@together("heads", [(1, 1), (4, 2), (3, 1)])
def test_dense_attention_equals_plain_loops(window, heads):
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((9, count, 8)) for count in (heads[0], heads[1], heads[1]))
    np.testing.assert_allclose(
        dense_attention(query, key, value, window), attend_by_loops(query, key, value, window), rtol=1e-10
    )


def whole(model, tokens, shift=0):
    windows = model.sizes.layer_window
    positions = np.arange(len(tokens)) + shift
    return model.forward(tokens, positions, lambda layer, q, k, v: dense_attention(q, k, v, windows(layer)))


def test_one_token_at_a_time_equals_the_whole_text():
    model = Model(SMALL, seed=3, dtype=np.float64)
    tokens = np.random.default_rng(1).integers(0, 64, 20)
    past = [([], []) for _ in range(SMALL.num_layers)]

    def attend(layer, query, key, value):
        keys, values = past[layer]
        keys.append(key[0])
        values.append(value[0])
        padded = np.zeros((len(keys), *query.shape[1:]))
        padded[-1] = query[0]
        return dense_attention(padded, np.array(keys), np.array(values), SMALL.layer_window(layer))[-1:]

    rows = [model.forward(tokens[[p]], np.array([p]), attend)[0] for p in range(20)]
    np.testing.assert_allclose(rows, whole(model, tokens), rtol=1e-9, atol=1e-12)


def test_attention_depends_on_distances_only():
    model = Model(SMALL, seed=3, dtype=np.float64)
    tokens = np.random.default_rng(1).integers(0, 64, 20)
    np.testing.assert_allclose(whole(model, tokens), whole(model, tokens, shift=17), rtol=1e-9, atol=1e-12)
    assert not np.allclose(whole(model, tokens)[-1], whole(model, np.append(tokens[-2::-1], tokens[-1]))[-1])


def test_models_of_one_seed_have_the_same_weights_in_every_dtype():
    single, double = Model(SMALL, 5), Model(SMALL, 5, np.float64)
    assert (single.embedding.dtype, double.embedding.dtype) == (np.float32, np.float64)
    assert (single.layers[2]["down"] == double.layers[2]["down"]).all()
    tokens = np.arange(12)
    np.testing.assert_allclose(single.logits(whole(single, tokens)), double.logits(whole(double, tokens)), atol=1e-4)
    assert not np.allclose(Model(SMALL, 6).head, single.head)


def test_every_second_layer_has_a_window():
    assert [spec.window for spec in SMALL.specs()] == [None, 5, None]


def test_noise_is_a_function_of_seed_request_sample_and_position():
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    drawn = [noise(*place, 8) for place in places]
    assert (noise(*places[0], 8) == drawn[0]).all()
    assert len({tuple(values) for values in drawn}) == len(places)


def test_scores_at_temperature_zero_are_the_logits():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    assert scores(logits, 0, 1, 2, 3, 0.0).tolist() == [1, 3, 2]


def test_samples_follow_the_softmax():
    logits = np.log(np.array([0.6, 0.3, 0.1]))
    drawn = [int(scores(logits, 0, 0, 0, position, 1.0).argmax()) for position in range(3000)]
    np.testing.assert_allclose(np.bincount(drawn) / 3000, [0.6, 0.3, 0.1], atol=0.03)
