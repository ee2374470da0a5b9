"""Layers, numbers of blocks and numbers of state slots of the caches of `test_hybrid_machine.py`."""

from pagecore import AttentionSpec, LatentSpec, Plane, StateSpec
from tests.cache.test_prefix_machine import CHUNKED, FULL, SINKED, WIDE, WINDOWED

SLIM = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=1)
AHEAD = AttentionSpec(1, 8, dtype="float32", num_query_heads=2, window=6, lookahead=3)
LATENT = LatentSpec(8, 4, 2, scale=0.3, dtype="float32")
APART = LatentSpec(8, 4, 2, scale=0.3, dtype="float32", joint=False, window=6)
CONV = Plane("conv", (3,), "float32", per="sequence")
TEMPORAL = Plane("temporal", (2, 2), "float32", per="sequence")


def state(*planes, **rules):
    return StateSpec(planes, **{"chunk": 4, "interval": 8} | rules)


def around(*attending, **rules):
    return [state(CONV, TEMPORAL, **rules), *attending, state(TEMPORAL, **rules)]


MODELS = {
    "in place": (around(FULL), [9], 6),
    "few slots": (around(FULL, WIDE), [11, 12], 4),
    "long chunks": (around(FULL, chunk=6, interval=12), [11], 7),
    "ping-pong": (around(FULL, in_place=False), [9], 9),
    "drafts": (around(FULL, draft_tokens=2), [9], 9),
    "many drafts": (around(FULL, WINDOWED, draft_tokens=5), [12, 11], 16),
    "many drafts, ping-pong": (around(FULL, draft_tokens=5, in_place=False), [12], 18),
    "int8 many drafts": (around(FULL, draft_tokens=4, checkpoint_format="int8"), [12], 14),
    "ping-pong drafts": (around(FULL, draft_tokens=1, in_place=False), [9], 9),
    "int8": (around(FULL, checkpoint_format="int8"), [9], 6),
    "int8 ping-pong drafts": (around(FULL, checkpoint_format="int8", draft_tokens=1, in_place=False), [9], 11),
    "int8 window": (around(FULL, WINDOWED, checkpoint_format="int8"), [10, 8], 6),
    "window": (around(FULL, WINDOWED), [10, 8], 7),
    "window, ping-pong drafts": (around(FULL, WINDOWED, in_place=False, draft_tokens=2), [9, 8], 9),
    "window alone": (around(WINDOWED), [10], 7),
    "sinks": (around(FULL, SINKED), [9, 9], 7),
    "int8 sinks and a window, ping-pong": (
        around(SINKED, WINDOWED, checkpoint_format="int8", in_place=False),
        [9, 9],
        8,
    ),
    "chunk, drafts": (around(CHUNKED, FULL, draft_tokens=2), [9, 9], 9),
    "int8 two windows, drafts": (around(WINDOWED, SLIM, checkpoint_format="int8", draft_tokens=2), [9, 8], 9),
    "lookahead, drafts": (around(AHEAD, FULL, draft_tokens=2), [9, 9], 9),
    "every limit, ping-pong drafts": (
        around(WINDOWED, SINKED, CHUNKED, WIDE, in_place=False, draft_tokens=1),
        [9, 9, 9, 10],
        9,
    ),
    "latents": (around(LATENT), [9], 7),
    "int8 latents and windows, drafts": (
        around(APART, WINDOWED, LATENT, checkpoint_format="int8", draft_tokens=2),
        [9, 8, 9],
        9,
    ),
    "states alone": (around(), None, 7),
    "int8 states alone, drafts": (around(checkpoint_format="int8", draft_tokens=2), None, 9),
    "states alone, ping-pong drafts": (around(in_place=False, draft_tokens=1), None, 9),
}
