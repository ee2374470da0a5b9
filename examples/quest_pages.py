"""Quest: decode over the few blocks whose key bounds promise the highest scores.

The layer stores the bounds of the keys of each block. A step scores all blocks by them, selects some for each key head,
and reads only their keys and values. Run it: python examples/quest_pages.py
"""

import numpy as np
from numpy.typing import NDArray

from pagecore import AttentionSpec, PagedKVCache, score_blocks, select

LENGTH, BLOCK, HEADS, KV_HEADS, DIM, STEPS = 4096, 16, 8, 2, 64, 8
random = np.random.default_rng(0)

spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS, key_bounds=True)
cache = PagedKVCache(spec, block_size=BLOCK, num_blocks=LENGTH // BLOCK + 3)


def make_context() -> NDArray[np.float32]:
    """Return keys whose direction drifts, as topics do in a text: [LENGTH, KV_HEADS, DIM]."""
    topics = np.repeat(random.normal(size=(LENGTH // 64, KV_HEADS, DIM)), 64, axis=0)
    return (topics + 0.5 * random.normal(size=topics.shape)).astype(np.float32)


def ask_about(keys: NDArray[np.float32], positions: list[int]) -> NDArray[np.float32]:
    """Return a query whose heads look for keys like those at `positions`: [1, HEADS, DIM]."""
    wanted = keys[positions].mean(axis=0).repeat(HEADS // KV_HEADS, axis=0)
    return (2 * wanted + 0.3 * random.normal(size=wanted.shape)).astype(np.float32)[None]


def main() -> None:
    keys = make_context()
    values = random.normal(size=keys.shape).astype(np.float32)
    sequence = cache.add_sequence(np.arange(LENGTH))
    with cache.prepare([sequence], LENGTH) as batch:
        cache.write(0, keys, values, batch)
        cache.commit(batch)

    budgets = (8, 16, 32, 64)
    errors = np.zeros((STEPS, len(budgets)))
    recalls = np.zeros((STEPS, len(budgets)))
    for step in range(STEPS):
        place = int(random.integers(0, LENGTH - 128))
        query = ask_about(keys, [place, place + 64])
        cache.append_tokens([sequence], [step])
        with cache.prepare([sequence], 1) as batch:
            cache.write(0, keys[-1:], values[-1:], batch)
            full = cache.attend(0, query, batch)
            scores = score_blocks(
                query,
                cache.plane("key_min", 0),
                cache.plane("key_max", 0),
                batch.group(0).block_table,
                batch.seq_lens,
                block_size=BLOCK,
                rows=batch.rows,
                cu_query_lens=batch.cu_query_lens,
            )
            pages = -(-(LENGTH + step + 1) // BLOCK)
            for i, budget in enumerate(budgets):
                blocks, counts = select(scores, budget - 2, lens=pages, sinks=1, recent=1)
                sparse = cache.attend(0, query, batch, blocks=blocks, block_counts=counts)
                errors[step, i] = np.linalg.norm(sparse - full) / np.linalg.norm(full)
                recalls[step, i] = recall(query, keys, blocks)
            cache.commit(batch)

    print("pages  read  error  recall of the 64 best keys")
    for i, budget in enumerate(budgets):
        print(f"{budget:5}  {budget / pages:4.0%}  {errors[:, i].mean():5.3f}  {recalls[:, i].mean():5.3f}")
    print(f"the error with a quarter of the pages is below 0.05: {errors[:, -1].mean() < 0.05}")


def recall(query: NDArray[np.float32], keys: NDArray[np.float32], blocks: NDArray[np.int32]) -> float:
    """Return the share of each key head's 64 best keys that lie in its selected blocks."""
    found = []
    for head, group in enumerate(query[0].reshape(KV_HEADS, -1, DIM)):
        best = np.argsort((group @ keys[:, head].T).max(axis=0))[-64:]
        found.append(np.isin(best // BLOCK, blocks[0, head]).mean())
    return float(np.mean(found))


if __name__ == "__main__":
    main()
