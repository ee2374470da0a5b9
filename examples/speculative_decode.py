"""Speculative decoding on one paged cache: drafts, verification, rollback, sliding windows and forks.

A drafter proposes up to four tokens for each sequence. One forward pass of the model verifies them: it keeps the
drafts that greedy decoding would have chosen, and adds one token of its own. `commit(batch, accepted=...)` forgets the
ids of the rejected drafts, and the next step writes to their slots. Every token is compared with greedy decoding
without drafts and without a cache.

Run it: python examples/speculative_decode.py
"""

import numpy as np
from tiny_windows import DIM, HEADS, KV_HEADS, VOCABULARY, WINDOWS, Array, embedding, forward, greedy, head, random

from pagecore import AttentionSpec, Batch, PagedKVCache, Sequence

BLOCK_SIZE, DRAFTS, LENGTH = 8, 4, 80

specs = [AttentionSpec(KV_HEADS, DIM, dtype="float32", window=window, num_query_heads=HEADS) for window in WINDOWS]
cache = PagedKVCache(specs, block_size=BLOCK_SIZE, num_blocks=200)
rejected_texts: list[list[int]] = []
likely_next = (embedding @ head).argmax(axis=-1)  # the drafter: the model without its attention


def propose(token: int, count: int) -> list[int]:
    drafts = []
    for _ in range(count):
        token = int(likely_next[token])
        drafts.append(token)
    return drafts


def compute(batch: Batch, ids: Array) -> Array:
    """Return the greedy next token after each token of the batch."""

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        cache.write(layer, key, value, batch)
        return cache.attend(layer, query, batch)

    return forward(ids, np.asarray(batch.positions)[: batch.num_tokens], attend).argmax(axis=-1)


def prefill(sequences: list[Sequence]) -> None:
    counts = [sequence.num_tokens - sequence.num_computed_tokens for sequence in sequences]
    with cache.prepare(sequences, counts) as batch:
        chosen = compute(batch, np.asarray(batch.token_ids)[: batch.num_tokens])
        cache.commit(batch)
    cache.append_tokens(sequences, chosen[np.cumsum(counts) - 1])


def speculate(sequences: list[Sequence], *, late: bool) -> tuple[int, int]:
    """Run one step: draft, verify, commit the accepted drafts. Return the numbers of drafts and of accepted drafts.

    Each sequence has one token that is not computed yet; the step computes it together with the drafts. With `late` the
    drafts are not appended before the step; the accepted drafts are appended after the commit.
    """
    last = [int(sequence.tokens[-1]) for sequence in sequences]
    room = [LENGTH - sequence.num_tokens - 1 for sequence in sequences]  # the model adds one token
    drafts = [propose(token, min(DRAFTS, most)) for token, most in zip(last, room, strict=True)]
    step_ids = [[token, *some] for token, some in zip(last, drafts, strict=True)]
    if not late:
        cache.append_tokens(sequences, drafts)
    with cache.prepare(sequences, [len(ids) for ids in step_ids]) as batch:
        ids = np.concatenate(step_ids) if late else np.asarray(batch.token_ids)[: batch.num_tokens]
        chosen = np.split(compute(batch, ids), np.asarray(batch.cu_query_lens)[1:-1])
        good = [num_agreeing(some, picked) for some, picked in zip(drafts, chosen, strict=True)]
        cache.commit(batch, accepted=[1 + n for n in good])  # the rejected drafts are forgotten
    for sequence, some, picked, n in zip(sequences, drafts, chosen, good, strict=True):
        cache.append_tokens([sequence], [[*(some[:n] if late else []), picked[n]]])
        if n < len(some):
            rejected_texts.append([*sequence.tokens[:-1].tolist(), *some[n:]])
    return sum(map(len, drafts)), sum(good)


def num_agreeing(drafts: list[int], chosen: Array) -> int:
    """Count the leading drafts that equal the model's own choices."""
    agrees = [draft == own for draft, own in zip(drafts, chosen, strict=False)]
    return agrees.index(False) if False in agrees else len(agrees)


# -- run and verify ---------------------------------------------------------------------------------------------------


def shared_length(first: list[int], second: list[int]) -> int:
    differs = [a != b for a, b in zip(first, second, strict=False)]
    return differs.index(True) if True in differs else len(differs)


def verify(sequences: list[Sequence], prompts: list[list[int]]) -> None:
    """Compare every token with the control, and check that only accepted tokens can be reused."""
    texts = [greedy(prompt, LENGTH) for prompt in prompts]
    assert [sequence.tokens.tolist() for sequence in sequences] == texts
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.num_computed_tokens == LENGTH - 1  # all but the last
        assert cache.match_length([*text, 0]) == (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE
    for rejected in rejected_texts:
        alike = max(shared_length(rejected, text[:-1]) for text in texts)
        reusable = min(alike, len(rejected) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert cache.match_length(rejected) == reusable
    again = cache.add_sequence(texts[0])  # computes its last block only
    prefill([again])
    assert again.tokens.tolist() == greedy(texts[0], LENGTH + 1)
    cache.check_invariants()
    print(f"every token equals greedy decoding; a second sequence reuses {again.num_cached_tokens} of {LENGTH} tokens")


def run(prompts: list[list[int]], *, late: bool) -> None:
    sequences = [cache.add_sequence(prompt) for prompt in prompts]
    prefill(sequences)
    fork = cache.fork(sequences[0], id="fork")  # the drafts of the parent do not belong to the fork
    cache.append_tokens([fork], [7])
    prefill([fork])
    prompts, sequences = [*prompts, fork.tokens[:-1].tolist()], [*sequences, fork]
    steps = drafted = accepted = 0
    while active := [sequence for sequence in sequences if sequence.num_tokens < LENGTH]:
        more = speculate(active, late=late)
        steps, drafted, accepted = steps + 1, drafted + more[0], accepted + more[1]
    when = "appended after the commit" if late else "appended before the step"
    print(f"drafts {when}: {accepted} of {drafted} accepted, {steps} steps")
    verify(sequences, prompts)
    for sequence in list(cache.sequences.values()):
        cache.remove(sequence)
    rejected_texts.clear()
    cache.clear_prefix_cache()


def main() -> None:
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (5, 19, 30)]
    for late in (False, True):
        run(prompts, late=late)
    print(f"{cache.stats().num_used_blocks} blocks held")


if __name__ == "__main__":
    main()
