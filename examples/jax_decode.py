"""Jitted decoding in JAX over a paged cache that JAX owns: pagecore allocates blocks, XLA updates them in place.

Two prompts of different lengths are prefilled and continued in one batch, with one compiled function for each shape.
Then every token is checked against attention over the whole text.

Run it: python examples/jax_decode.py
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagecore import AttentionSpec, Batch, PagedKVCache, Sequence
from pagecore.interop import jax as pagecore_jax

VOCABULARY, LAYERS, HEADS, KV_HEADS, DIM = 64, 4, 4, 2, 32
BLOCKS, BLOCK_SIZE, STEPS = 32, 16, 40
WIDTH = HEADS * DIM
random = np.random.default_rng(0)
embedding = jnp.array(random.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
unembedding = jnp.array(random.normal(size=(WIDTH, VOCABULARY)), jnp.float32)
weights = {
    "query": jnp.array(random.normal(size=(LAYERS, WIDTH, WIDTH), scale=0.1), jnp.float32),
    "key_value": jnp.array(random.normal(size=(LAYERS, WIDTH, 2 * KV_HEADS * DIM), scale=0.1), jnp.float32),
    "output": jnp.array(random.normal(size=(LAYERS, WIDTH, WIDTH), scale=0.1), jnp.float32),
}


def model(ids: jax.Array, attend: Callable[..., Any], state: Any) -> tuple[jax.Array, Any]:
    """Return the next token after each of `ids`; attend(layer, query, key, value, state) -> output, state."""

    def layer_of(carry: Any, layer: Any) -> tuple[Any, None]:
        hidden, state = carry
        index, weight = layer
        query = (hidden @ weight["query"]).reshape(-1, HEADS, DIM)
        key, value = jnp.split((hidden @ weight["key_value"]).reshape(-1, 2 * KV_HEADS, DIM), 2, axis=1)
        output, state = attend(index, query, key, value, state)
        return (hidden + output.reshape(-1, WIDTH) @ weight["output"], state), None

    (hidden, state), _ = jax.lax.scan(layer_of, (embedding[ids], state), (jnp.arange(LAYERS), weights))
    return (hidden @ unembedding).argmax(axis=-1), state


@pagecore_jax.jit(caches=("keys", "values"))
def step(keys: jax.Array, values: jax.Array, ids: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run one forward pass; the caches, [layers, blocks, heads, block_size, dim], are updated in place."""

    def attend(layer: Any, query: Any, key: Any, value: Any, caches: tuple[Any, Any]) -> tuple[Any, Any]:
        plane = {"layer": layer, "layout": "HND"}
        keys, values = pagecore_jax.write_kv(key, value, *caches, arrays.slot_mapping, **plane)
        table, lens, starts = arrays.block_table, arrays.seq_lens, arrays.cu_query_lens
        output = pagecore_jax.paged_attention(query, keys, values, table, lens, cu_query_lens=starts, **plane)
        return output, (keys, values)

    sampled, (keys, values) = model(ids, attend, (keys, values))
    return sampled, keys, values


@jax.jit
def dense(ids: jax.Array) -> jax.Array:
    """Return the next token after each token of a text, computed without a cache."""

    def attend(_: Any, query: Any, key: Any, value: Any, state: Any) -> tuple[jax.Array, Any]:
        key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (key, value))
        scores = jnp.einsum("qhd,khd->hqk", query, key) / DIM**0.5
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), value), state

    return model(ids, attend, None)[0]


def main() -> None:
    # The cache manages blocks without bytes, which JAX owns. Indices are int32, because JAX disables int64 by default.
    spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
    cache = PagedKVCache(spec, num_blocks=BLOCKS, block_size=BLOCK_SIZE, device="none", index_dtype="int32")
    keys, values = jnp.zeros((2, LAYERS, BLOCKS, KV_HEADS, BLOCK_SIZE, DIM), jnp.float32)
    address = keys.unsafe_buffer_pointer()

    def forward(batch: Batch, sequences: list[Sequence], counts: list[int]) -> None:
        nonlocal keys, values
        cache.prepare(sequences, counts, out=batch)
        ids = np.zeros(batch.max_tokens, np.int32)
        done = [sequence.num_computed_tokens for sequence in sequences]
        new = [sequence.tokens[n : n + count] for sequence, n, count in zip(sequences, done, counts, strict=True)]
        ids[: batch.num_tokens] = np.concatenate(new)
        sampled, keys, values = step(keys, values, ids, pagecore_jax.step_arrays(batch, max_blocks=8))
        last = np.cumsum(counts) - 1
        sampled = np.asarray(sampled)[last]
        cache.commit(batch)
        cache.append_tokens(sequences, sampled)

    prompts = [random.integers(VOCABULARY, size=length).tolist() for length in (21, 9)]
    sequences = [cache.add_sequence(prompt) for prompt in prompts]
    forward(cache.make_batch(max_sequences=2, max_tokens=32), sequences, [21, 9])
    decode = cache.make_batch(max_sequences=2)
    forward(decode, sequences, [1, 1])  # compiles
    begin = time.perf_counter()
    for _ in range(STEPS):
        forward(decode, sequences, [1, 1])
    each_us = (time.perf_counter() - begin) / STEPS * 1e6

    for sequence, prompt in zip(sequences, prompts, strict=True):
        text = sequence.tokens.tolist()
        assert text[len(prompt) :] == dense(jnp.array(text))[len(prompt) - 1 : -1].tolist()
        print(*text[len(prompt) :])
    print("every token equals attention over the whole text")
    assert keys.unsafe_buffer_pointer() == address
    print(f"the caches never moved; {each_us:.0f} us a step, {LAYERS} layers, {len(sequences)} sequences")


if __name__ == "__main__":
    main()
