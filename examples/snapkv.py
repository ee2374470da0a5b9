"""SnapKV: after the prompt, keep the tokens that its last queries attend to, and free the blocks of the others.

The sums of attention over the last queries are pooled over neighbouring tokens; the best tokens and the last queries'
own are kept. The cache moves them together, and decoding continues with true positions.

Run it: python examples/snapkv.py
"""

import numpy as np
from numpy.typing import NDArray

from pagecore import AttentionSpec, PagedKVCache, select

LENGTH, WINDOW, KEPT, POOL, HEADS, KV_HEADS, DIM = 2048, 32, 480, 7, 8, 2, 64
random = np.random.default_rng(0)


def make_prompt() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return queries, keys and values of a prompt of topics whose last queries ask about four of them."""
    topics = random.normal(size=(LENGTH // 64, KV_HEADS, DIM))
    keys = np.repeat(topics, 64, axis=0) + 0.7 * random.normal(size=(LENGTH, KV_HEADS, DIM))
    asked = random.choice(LENGTH // 64 - 1, 4, replace=False)
    wanted = topics[random.choice(asked, LENGTH)].repeat(HEADS // KV_HEADS, axis=1)
    queries = wanted + 0.3 * random.normal(size=(LENGTH, HEADS, DIM))
    values = random.normal(size=keys.shape) + np.repeat(random.normal(size=topics.shape), 64, axis=0)
    return queries.astype(np.float32), keys.astype(np.float32), values.astype(np.float32)


def observed_scores(queries: NDArray[np.float32], keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the attention of the last WINDOW queries to older tokens, summed over queries and heads, and pooled."""
    older = LENGTH - WINDOW
    grouped = queries[older:].reshape(WINDOW, KV_HEADS, -1, DIM)
    scores = np.einsum("qhgd,khd->qhgk", grouped, keys[:older]) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=(0, 1, 2))
    padded = np.pad(sums, POOL // 2, constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, POOL).max(axis=1)
    return np.append(pooled, np.zeros(WINDOW)).astype(np.float32)


def main() -> None:
    queries, keys, values = make_prompt()
    spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
    cache = PagedKVCache(spec, block_size=16, num_blocks=2 * LENGTH // 16, prefix_cache=False)
    sequence = cache.add_sequence(np.arange(LENGTH))
    with cache.prepare([sequence], LENGTH) as batch:
        cache.write(0, keys, values, batch)
        cache.commit(batch)
    whole = cache.fork(sequence)  # keeps everything, for comparison
    held = sequence.capacity // 16

    kept, _ = select(observed_scores(queries, keys), KEPT, lens=LENGTH, recent=WINDOW)
    cache.compact(sequence, kept)
    print(f"{LENGTH} tokens compacted to {sequence.num_computed_tokens}: {held} blocks, now {sequence.capacity // 16}")

    errors: list[float] = []
    for _ in range(16):
        asked = int(random.integers(LENGTH - WINDOW, LENGTH))
        query = queries[[asked, asked]] + 0.1 * random.normal(size=(2, HEADS, DIM)).astype(np.float32)
        query[1] = query[0]
        cache.append_tokens([sequence, whole], [1, 1])
        with cache.prepare([sequence, whole], 1) as batch:
            positions = np.asarray(batch.positions)[:2]
            assert positions[0] == positions[1] == LENGTH + len(errors)
            cache.write(0, keys[[asked, asked]], values[[asked, asked]], batch)
            short, full = cache.attend(0, query, batch)
            cache.commit(batch)
        errors.append(float(np.linalg.norm(short - full) / np.linalg.norm(full)))
    print(f"error of 16 decoded tokens against the whole cache: {np.mean(errors):.3f}")
    print(f"positions continue at {LENGTH}, and the error is below 0.05: {np.mean(errors) < 0.05}")


if __name__ == "__main__":
    main()
