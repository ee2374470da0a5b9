"""Synthetic trace in the Mooncake format, for machines without a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pagecore.serving.replay.trace import HASH_BLOCK

SEED = 0


def write_trace(path: Path, num_requests: int, scale: float = 1.0) -> None:
    """Write chats with random arrivals and lognormal lengths, a third of which continue an earlier prompt.

    The medians of 6,900 input tokens and 350 output tokens, times `scale`, approximate Mooncake's conversation trace.
    Equal arguments give equal files.
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
            # The last of the earlier ids may belong to a partial block, so it is not shared.
            hash_ids = earlier[: max(0, min(len(earlier) - 1, blocks - 1))]
            new = blocks - len(hash_ids)
            hash_ids = hash_ids + list(range(fresh, fresh + new))
            fresh += new
            chats.append(hash_ids)
            line = {"timestamp": int(timestamp), "input_length": length, "output_length": output, "hash_ids": hash_ids}
            file.write(json.dumps(line) + "\n")


def _lengths(random: np.random.Generator, count: int, median: float, sigma: float, longest: int) -> list[int]:
    lengths: list[int] = np.clip(random.lognormal(np.log(median), sigma, count), 1, longest).astype(int).tolist()
    return lengths
