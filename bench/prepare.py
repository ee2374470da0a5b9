"""What the index costs a step: prepare and plan of a decode batch, and its commit."""

from bench.runner import alone
from pagecore import AttentionSpec, PagedKVCache

BATCH, CONTEXT, CAPACITY, BLOCK = 256, 8192, 131_072, 16
SPEC = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32)
WINDOWED = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32, window=4096)


def run() -> dict[str, object]:
    """Prepare + plan (the target is 40 us, the goal 20) and commit, of 256 decode rows at 8k in rows of 128k."""
    return {name: _step(name, layers) for name, layers in (("one group", [SPEC]), ("full + window", [SPEC, WINDOWED]))}


def _step(name: str, layers: list[AttentionSpec]) -> dict[str, dict[str, float]]:
    blocks = BATCH * (CONTEXT // BLOCK + 256) + 1
    cache = PagedKVCache(
        layers,
        block_size=BLOCK,
        num_blocks=blocks,
        max_sequences=BATCH,
        max_tokens_per_sequence=CAPACITY,
        device="none",
    )
    sequences = [cache.add_sequence([]) for _ in range(BATCH)]
    prefill = cache.make_batch(1, CONTEXT)
    for i, sequence in enumerate(sequences):
        # Uneven lengths, so that in each step one row in sixteen needs a block.
        cache.prepare([sequence], CONTEXT - i % BLOCK, out=prefill)
        cache.commit(prefill)
    batch = cache.make_batch(BATCH, BATCH)
    counts = [1] * BATCH

    def step() -> None:
        cache.prepare(sequences, counts, out=batch)
        cache.commit(batch)

    step()
    prepare = alone(
        f"{name}: prepare + plan",
        lambda: cache.prepare(sequences, counts, out=batch),
        after=lambda: cache.commit(batch),
    )
    return {"prepare": prepare, "step": alone(f"{name}: prepare + plan + commit", step)}
