"""Prompts longer than the host tier: sizes, steps, and what stores have of them."""

import numpy as np

from pagecore.tiers.keys import content_chain, lane_keys
from tests.tiers.manager.served import BLOCK, vectors

# 25 blocks and a token, more than three times what the host has.
PROMPT = np.arange(101, dtype=np.int32)
HOST = 9
LONG = {"num_blocks": 40, "host_blocks": HOST}


def stored(store, fingerprint, prompt=PROMPT, lane=0):
    """Return True for each block of a prompt that a store has."""
    keys = lane_keys(content_chain(fingerprint, prompt[: len(prompt) // BLOCK * BLOCK]), lane)
    return [key.tobytes() in store.data for key in keys]


def compute_in_steps(served, tokens, step):
    """Compute a prompt in steps, with a poll after each, as an engine does; return the tokens reused."""
    with served.tiers.add_sequence(tokens) as sequence:
        cached = sequence.num_cached_tokens
        served.verify(sequence, tokens, None, cached)
        while sequence.num_computed_tokens < len(tokens):
            begin = sequence.num_computed_tokens
            batch = served.cache.prepare([sequence], min(step, len(tokens) - begin))
            end = min(begin + step, len(tokens))
            for layer in range(len(served.layers)):
                rows = vectors(tokens, None, layer)[begin:end]
                served.cache.write(layer, rows, -rows, batch)
            served.cache.commit(batch)
            served.tiers.poll()
            served.tiers.check_invariants()
        return cached


def check_at_rest(served):
    served.tiers.check_invariants()
    assert served.tiers.host.num_leases == served.tiers.stats().streams.num_leased_blocks == 0
