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


def write_shared_prompts(path: Path, num_requests: int, num_prompts: int, scale: float = 1.0) -> None:
    """Write requests that each begin with one of `num_prompts` shared prompts, popular ones more often (Zipf).

    A shared prompt has 2,048 to 8,192 tokens, a question a median of 300 and an answer of 200, times `scale`. Equal
    arguments give equal files.
    """
    random = np.random.default_rng(SEED)
    weights = 1 / np.arange(1, num_prompts + 1)
    chosen = random.choice(num_prompts, num_requests, p=weights / weights.sum())
    blocks = random.integers(max(1, int(4 * scale)), max(2, int(16 * scale)) + 1, num_prompts)
    starts = np.concatenate([[0], np.cumsum(blocks)])
    questions = _lengths(random, num_requests, 300 * scale, 0.8, 4096)
    outputs = _lengths(random, num_requests, 200 * scale, 0.6, 1000)
    fresh = int(starts[-1])
    with path.open("w") as file:
        for number, (prompt, question, output) in enumerate(zip(chosen.tolist(), questions, outputs, strict=True)):
            own = -(-question // HASH_BLOCK)
            hash_ids = [*range(int(starts[prompt]), int(starts[prompt + 1])), *range(fresh, fresh + own)]
            fresh += own
            length = int(blocks[prompt]) * HASH_BLOCK + question
            line = {"timestamp": 100 * number, "input_length": length, "output_length": output, "hash_ids": hash_ids}
            file.write(json.dumps(line) + "\n")


def _lengths(random: np.random.Generator, count: int, median: float, sigma: float, longest: int) -> list[int]:
    lengths: list[int] = np.clip(random.lognormal(np.log(median), sigma, count), 1, longest).astype(int).tolist()
    return lengths
