"""Host attention over a paged cache against torch's SDPA on contiguous copies, one thread each."""

import numpy as np

import pagecore
from bench.runner import against
from pagecore import AttentionSpec, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
DTYPES = ("float32", "bfloat16", "float16")


def run() -> dict[str, object]:
    """Decode of 8 sequences of 1,024 tokens (the target in float32 is 0.5x), and a causal prefill of 512."""
    import torch

    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for dtype in DTYPES:
        results[f"decode {dtype}"] = _decode(torch, dtype)
    for dtype in DTYPES[:2]:
        results[f"prefill {dtype}"] = _prefill(torch, dtype)
    return results


def _filled(dtype: str, num_sequences: int, length: int):
    """A cache of random keys and values in shuffled blocks, its sequences, and key and value as [n, length, H, D]."""
    spec = AttentionSpec(KV_HEADS, DIM, dtype=dtype, num_query_heads=HEADS)
    blocks = num_sequences * (length // BLOCK + 1) + 1
    cache = PagedKVCache(spec, block_size=BLOCK, num_blocks=blocks, max_sequences=num_sequences)
    random = np.random.default_rng(0)
    key, value = random.normal(size=(2, num_sequences, length, KV_HEADS, DIM)).astype(np.float32)
    sequences = [cache.add_sequence([]) for _ in range(num_sequences)]
    for start in range(0, length, BLOCK):
        # Round robin, so that a sequence's blocks do not lie side by side.
        batch = cache.prepare(sequences, BLOCK)
        part = slice(start, start + BLOCK)
        cache.write(0, key[:, part].reshape(-1, KV_HEADS, DIM), value[:, part].reshape(-1, KV_HEADS, DIM), batch)
        cache.commit(batch)
    return cache, sequences, key, value


def _decode(torch, dtype: str) -> dict[str, float | str]:
    num_sequences, length = 8, 1024
    cache, sequences, key, value = _filled(dtype, num_sequences, length - BLOCK)
    batch = cache.prepare(sequences, BLOCK)
    rest = np.random.default_rng(1).normal(size=(2, num_sequences * BLOCK, KV_HEADS, DIM)).astype(np.float32)
    cache.write(0, rest[0], rest[1], batch)
    seq_lens = np.full(num_sequences, length, np.int32)
    query = _cast(torch, np.random.default_rng(2).normal(size=(num_sequences, HEADS, DIM)), dtype)
    out = torch.empty_like(query)
    group = batch.group(0)

    def ours() -> None:
        pagecore.paged_attention(
            query, cache.key(0), cache.value(0), group.block_table, seq_lens, rows=batch.rows, out=out
        )

    joined = [
        np.concatenate([old, new.reshape(num_sequences, BLOCK, KV_HEADS, DIM)], 1)
        for old, new in ((key, rest[0]), (value, rest[1]))
    ]
    keys, values = (_cast(torch, array.transpose(0, 2, 1, 3), dtype).contiguous() for array in joined)
    folded = query.reshape(num_sequences, KV_HEADS, HEADS // KV_HEADS, DIM)

    def theirs():
        return torch.nn.functional.scaled_dot_product_attention(folded, keys, values)

    ours()
    difference = (out.float() - theirs().reshape(out.shape).float()).abs().max().item()
    assert difference < (1e-5 if dtype == "float32" else 3e-2), difference
    return against(f"decode 8 x 1k, 32/8 x 128, {dtype}", ours, "torch SDPA", theirs, rounds=25)


def _prefill(torch, dtype: str) -> dict[str, float | str]:
    length = 512
    cache = PagedKVCache(
        AttentionSpec(KV_HEADS, DIM, dtype=dtype, num_query_heads=HEADS),
        block_size=BLOCK,
        num_blocks=length // BLOCK + 1,
    )
    sequence = cache.add_sequence([])
    random = np.random.default_rng(3)
    key, value = random.normal(size=(2, length, KV_HEADS, DIM)).astype(np.float32)
    batch = cache.prepare([sequence], length)
    cache.write(0, key, value, batch)
    query = _cast(torch, random.normal(size=(length, HEADS, DIM)), dtype)
    out = torch.empty_like(query)
    keys, values = (
        _cast(torch, array.transpose(1, 0, 2)[None], dtype).repeat_interleave(HEADS // KV_HEADS, 1)
        for array in (key, value)
    )
    queries = query.transpose(0, 1)[None].contiguous()
    return against(
        f"prefill 512 causal, 32/8 x 128, {dtype}",
        lambda: cache.attend(0, query, batch, out=out),
        "torch SDPA",
        lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True),
    )


def _cast(torch, array, dtype: str):
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(getattr(torch, dtype))
