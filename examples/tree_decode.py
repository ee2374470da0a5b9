"""Speculative decoding with trees of drafts: several candidates for each position, verified in one forward pass.

A drafter proposes the two likeliest tokens after each token, up to three levels deep: a tree of 14 drafts. One forward
pass of the model verifies all of them; `prepare(..., parents=...)` gives every draft the position of its depth, and
`attend` lets it see its ancestors only. The longest branch that greedy decoding would have chosen is kept by
`commit(batch, accepted_path=...)`, which moves its keys and values together. Every token is compared with greedy
decoding without drafts and without a cache.

Run it: python examples/tree_decode.py
"""

import numpy as np
from tiny_windows import DIM, HEADS, KV_HEADS, VOCABULARY, WINDOWS, Array, embedding, forward, greedy, head, random

from pagecore import AttentionSpec, PagedKVCache, Sequence

BLOCK_SIZE, BRANCHES, LEVELS, LENGTH = 8, 2, 3, 80

specs = [AttentionSpec(KV_HEADS, DIM, dtype="float32", window=window, num_query_heads=HEADS) for window in WINDOWS]
cache = PagedKVCache(specs, block_size=BLOCK_SIZE, num_blocks=200)
batch = cache.make_batch(4, 64, max_tree_tokens=16)
likely_next = np.argsort(embedding @ head, axis=-1)[:, ::-1]  # the drafter: the model without its attention


def propose(token: int, levels: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a tree, the root among them, and the parent of each."""
    tokens, parents, level = [token], [-1], [0]
    for _ in range(levels):
        level = [grow(tokens, parents, at, draft) for at in level for draft in likely_next[tokens[at]][:BRANCHES]]
    return tokens, parents


def grow(tokens: list[int], parents: list[int], parent: int, draft: int) -> int:
    tokens.append(int(draft))
    parents.append(parent)
    return len(tokens) - 1


def longest_branch(tokens: list[int], parents: list[int], chosen: Array) -> list[int]:
    """Return the path, root first, each of whose drafts is the model's choice after the token before it."""
    path = [0]
    for token in range(1, len(tokens)):  # parents come before their children
        if parents[token] == path[-1] and tokens[token] == chosen[path[-1]]:
            path.append(token)
    return path


def compute(ids: Array) -> Array:
    """Return the greedy next token after each token of the batch."""

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        cache.write(layer, key, value, batch)
        return np.asarray(cache.attend(layer, query, batch))

    return forward(ids, np.asarray(batch.positions)[: batch.num_tokens], attend).argmax(axis=-1)


def prefill(sequences: list[Sequence]) -> None:
    counts = [sequence.num_tokens - sequence.num_computed_tokens for sequence in sequences]
    with cache.prepare(sequences, counts, batch):
        chosen = compute(np.asarray(batch.token_ids)[: batch.num_tokens])
        cache.commit(batch)
    cache.append_tokens(sequences, chosen[np.cumsum(counts) - 1])


def speculate(sequences: list[Sequence]) -> int:
    """Run one step: draft a tree for each sequence, verify it, commit the accepted path. Return the accepted drafts."""
    room = [LENGTH - sequence.num_tokens - 1 for sequence in sequences]  # the model adds one token
    drafted = [
        propose(int(sequence.tokens[-1]), min(LEVELS, most)) for sequence, most in zip(sequences, room, strict=True)
    ]
    trees = [parents for _, parents in drafted]
    cache.append_tokens(sequences, [tokens[1:] for tokens, _ in drafted])  # the root is known, and not computed yet
    with cache.prepare(sequences, [len(parents) for parents in trees], batch, parents=trees):
        ids = np.asarray(batch.token_ids)[: batch.num_tokens]
        chosen = np.split(compute(ids), np.asarray(batch.cu_query_lens)[1 : len(sequences)])
        paths = [longest_branch(*tree, picked) for tree, picked in zip(drafted, chosen, strict=True)]
        cache.commit(batch, accepted_path=paths)
    cache.append_tokens(sequences, [[picked[path[-1]]] for path, picked in zip(paths, chosen, strict=True)])
    return sum(map(len, paths)) - len(paths)


def main() -> None:
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (5, 19, 30)]
    sequences = [cache.add_sequence(prompt) for prompt in prompts]
    prefill(sequences)
    steps = accepted = 0
    while active := [sequence for sequence in sequences if sequence.num_tokens < LENGTH]:
        steps, accepted = steps + 1, accepted + speculate(active)
    texts = [greedy(prompt, LENGTH) for prompt in prompts]
    assert [sequence.tokens.tolist() for sequence in sequences] == texts
    for text in texts:  # full blocks of the text can be reused
        assert cache.match_length([*text, 0]) == (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE
    cache.check_invariants()
    print(f"{steps} steps, {accepted} drafts accepted; every token equals greedy decoding")


if __name__ == "__main__":
    main()
