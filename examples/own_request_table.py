"""An engine with its own request table: slots from a SlotAllocator, attention over block tables made from them.

Run it: python examples/own_request_table.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagecore import BlockPool, RequestTable, SlotAllocator, paged_attention, write_kv

BLOCK, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
random = np.random.default_rng(0)

pool = BlockPool(64)
allocator = SlotAllocator(pool, BLOCK)
requests = RequestTable(num_requests=8, max_context=256)
# The memory belongs to the engine: two arrays of any kind, for the keys and the values of a layer.
key_cache, value_cache = np.zeros((2, pool.num_blocks, BLOCK, KV_HEADS, DIM), np.float32)


def attend(rows: Any, counts: Sequence[int]) -> Any:
    """Write and attend the last `counts` tokens of each request; their slots are already in the table."""
    lengths = [requests.length(row) for row in rows]
    slots = [requests.read(row, 0, length) for row, length in zip(rows, lengths, strict=True)]
    new = np.concatenate([own[len(own) - count :] for own, count in zip(slots, counts, strict=True)])
    key, value = random.normal(size=(2, len(new), KV_HEADS, DIM)).astype(np.float32)
    write_kv(key, value, key_cache, value_cache, new)
    # The first slot of each block identifies the block.
    table = np.zeros((len(rows), -(-max(lengths) // BLOCK)), np.int32)
    for entries, own in zip(table, slots, strict=True):
        entries[: -(-len(own) // BLOCK)] = own[::BLOCK] // BLOCK
    query = random.normal(size=(len(new), HEADS, DIM)).astype(np.float32)
    starts = np.cumsum([0, *counts])
    return paged_attention(query, key_cache, value_cache, table, lengths, cu_query_lens=starts)


def main() -> None:
    prompts = [40, 7, 100]
    rows = requests.allocate(len(prompts))
    for row, length in zip(rows, prompts, strict=True):
        requests.write(row, 0, allocator.allocate(length))
    print("prefill:", attend(rows, prompts).shape)

    lengths = np.asarray(prompts)
    for _ in range(20):
        last = np.concatenate(
            [requests.read(row, length - 1, length) for row, length in zip(rows, lengths, strict=True)]
        )
        slots = allocator.decode(lengths + 1, last)  # one call for the whole batch
        for row, length, slot in zip(rows, lengths, slots, strict=True):
            requests.write(row, length, [slot])
        lengths += 1
        output = attend(rows, [1] * len(rows))
    print("decode:", output.shape, "lengths", lengths.tolist())

    print(pool.num_used, "blocks held")
    with allocator.free_group():  # all blocks are freed in one call
        for row in rows:
            allocator.free(requests.read(row, 0, requests.length(row)))
    requests.free(rows)
    print(pool.num_used, "blocks held after all requests have left")


if __name__ == "__main__":
    main()
