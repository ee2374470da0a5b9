"""A trace made on the spot, in the Mooncake format, for machines that have none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pagecore.serving.replay.trace import HASH_BLOCK

SEED = 0


def write_trace(path: Path, num_requests: int, scale: float = 1.0) -> None:
    """Write chats that arrive at random: lognormal lengths, a third of them going on with an earlier prompt.

    Medians of 6,900 tokens of input and 350 of output, times `scale`, are about those of Mooncake's conversation
    trace. The same numbers give the same file.
    """
    random = np.random.default_rng(SEED)
    timestamps = np.cumsum(random.exponential(300, num_requests)).astype(int)
    inputs = _lengths(random, num_requests, 6900 * scale, 1.0, 120_000)
    outputs = _lengths(random, num_requests, 350 * scale, 0.6, 2000)
    chats: list[list[int]] = []
    fresh = 0
    with path.open("w") as file:
        for timestamp, length, output in zip(timestamps, inputs, outputs, strict=True):
            blocks = -(-length // HASH_BLOCK)
            earlier = chats[random.integers(len(chats))] if chats and random.random() < 1 / 3 else []
            # The last of the earlier ids may stand for a block that was not full: it is not shared.
            hash_ids = earlier[: max(0, min(len(earlier) - 1, blocks - 1))]
            new = blocks - len(hash_ids)
            hash_ids = hash_ids + list(range(fresh, fresh + new))
            fresh += new
            chats.append(hash_ids)
            line = {"timestamp": int(timestamp), "input_length": length, "output_length": output, "hash_ids": hash_ids}
            file.write(json.dumps(line) + "\n")


def _lengths(random: np.random.Generator, count: int, median: float, sigma: float, longest: int) -> list[int]:
    return np.clip(random.lognormal(np.log(median), sigma, count), 1, longest).astype(int).tolist()
