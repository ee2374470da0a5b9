"""A small model in NumPy for the examples of speculative decoding: attention layers with and without a sliding window.

The model knows no cache. `forward` takes the tokens of a step as a flat batch, and a function that attends. `greedy`
decodes without drafts and without a cache, as the control.

Run it: python examples/tiny_windows.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
# (layer, query [T, HEADS, DIM], key [T, KV_HEADS, DIM], value [T, KV_HEADS, DIM]) -> [T, HEADS, DIM]
Attend = Callable[[int, Array, Array, Array], Array]

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM = 96, 64, 4, 2, 16
WINDOWS = [None, 12, None, 12]  # window of each layer; the cache has two groups
random = np.random.default_rng(0)


def weights(rows: int, columns: int, gain: float = 1.0) -> Array:
    return random.normal(size=(rows, columns), scale=gain / rows**0.5).astype(np.float32)


embedding, head, position_embedding = weights(VOCABULARY, WIDTH, 10), weights(WIDTH, VOCABULARY), weights(256, WIDTH, 3)
layers = [
    {"qkv": weights(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), "out": weights(HEADS * DIM, WIDTH, 0.3)} for _ in WINDOWS
]


def normalize(hidden: Array) -> Array:
    return hidden / np.sqrt(np.mean(hidden * hidden, axis=-1, keepdims=True) + 1e-5)


def forward(ids: Any, positions: Array, attend: Attend) -> Array:
    """Return the logits `[T, VOCABULARY]` of T tokens; attend(layer, query, key, value) -> `[T, HEADS, DIM]`."""
    hidden = embedding[ids] + position_embedding[positions]
    for layer, each in enumerate(layers):
        heads = (normalize(hidden) @ each["qkv"]).reshape(len(ids), -1, DIM)
        query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        hidden = hidden + attend(layer, query, key, value).reshape(len(ids), -1) @ each["out"]
    return normalize(hidden) @ head


def attend_dense(layer: int, query: Array, key: Array, value: Array) -> Array:
    key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
    distance = np.subtract.outer(np.arange(len(query)), np.arange(len(query)))
    seen = (distance >= 0) & (distance < (WINDOWS[layer] or len(query)))
    scores = np.where(seen, np.einsum("qhd,khd->hqk", query, key) / DIM**0.5, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), value)


def greedy(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(int(forward(text, np.arange(len(text)), attend_dense)[-1].argmax()))
    return text


if __name__ == "__main__":
    print("greedy decoding:", *greedy([3, 1, 4, 1, 5], 20))
