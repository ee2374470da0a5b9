"""A decode loop in NumPy: prefill two prompts of different lengths, then decode both in one batch.

Run it: python examples/numpy_decode.py
"""

from typing import Any

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, Sequence

VOCABULARY, HEADS, KV_HEADS, DIM = 64, 4, 2, 32
random = np.random.default_rng(0)
embedding = random.normal(size=(VOCABULARY, HEADS * DIM)).astype(np.float32)
to_query = random.normal(size=(HEADS * DIM, HEADS * DIM), scale=0.1).astype(np.float32)
to_key_value = random.normal(size=(HEADS * DIM, 2 * KV_HEADS * DIM), scale=0.1).astype(np.float32)

spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
cache = PagedKVCache(spec, block_size=16, num_blocks=32)
batch = cache.make_batch(max_sequences=2, max_tokens=64)


def step(sequences: list[Sequence], counts: list[int]) -> Any:
    """Compute the next `counts` tokens of each sequence; return the most likely next token of each."""
    cache.prepare(sequences, counts, out=batch)
    done = [sequence.num_computed_tokens for sequence in sequences]
    ids = [sequence.tokens[n : n + count] for sequence, n, count in zip(sequences, done, counts, strict=True)]
    hidden = embedding[np.concatenate(ids)]
    key, value = np.split((hidden @ to_key_value).reshape(-1, 2 * KV_HEADS, DIM), 2, axis=1)
    cache.write(0, key, value, batch)
    attended = cache.attend(0, (hidden @ to_query).reshape(-1, HEADS, DIM), batch)
    cache.commit(batch)
    last = np.cumsum(counts) - 1
    return (attended[last].reshape(-1, HEADS * DIM) @ embedding.T).argmax(axis=-1)


def main() -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    sequences = [cache.add_sequence(prompt) for prompt in prompts]
    sampled = step(sequences, [len(prompt) for prompt in prompts])
    for _ in range(20):
        cache.append_tokens(sequences, sampled)
        sampled = step(sequences, [1, 1])
    for sequence in sequences:
        print(sequence.tokens.tolist())
    print(f"{cache.stats().num_used_blocks} blocks held")


if __name__ == "__main__":
    main()
