"""Small random traces with shared prefixes."""

import json

import numpy as np


def mooncake(path, seed=0, requests=80, most=9, lengths=None):
    """Write a Mooncake trace of chats that branch and grow; return its path."""
    random = np.random.default_rng(seed)
    chats, lines, fresh = [[0]], [], iter(range(1, 1 << 20))
    for number in range(requests):
        kind = random.integers(4)
        ids = list(chats[random.integers(len(chats))])
        if kind == 0:
            ids = [0, next(fresh)]
        elif kind == 1:
            ids = ids[: random.integers(1, len(ids) + 1)]
        ids = (ids + [next(fresh) for _ in range(random.integers(0, 3))])[:most]
        chats.append(ids)
        length = len(ids) * 512 - int(random.choice([0, 0, 1, 16, 100, 511]))
        lines.append(
            json.dumps({"timestamp": number * 100, "input_length": length, "output_length": 5, "hash_ids": ids})
        )
    path.write_text("\n".join(lines) + "\n")
    return path
