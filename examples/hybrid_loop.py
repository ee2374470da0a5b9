"""A layer with recurrent states and a layer with attention in one cache, served by `Scheduler`.

The recurrent layer is linear attention with decay: a state ``[dim, dim]`` for each sequence, which every token decays
and extends. Requests share a prefix, so that most of them begin with a cached state. One forward pass fails after it
has overwritten states. At the end every token is compared with the recurrence of the whole text.

Run it: python examples/hybrid_loop.py
"""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, StateSpec
from pagecore.serving import Request, Scheduler, Step
from pagecore.storage.state_shapes import lightning_planes

DIM, VOCABULARY, DECAY = 16, 500, np.float32(0.97)
random = np.random.default_rng(0)
embedding = random.standard_normal((VOCABULARY, DIM), np.float32)
head = random.standard_normal((DIM, VOCABULARY), np.float32)

state = StateSpec(lightning_planes(heads=1, head_dim=DIM), chunk=16, interval=64)
attention = AttentionSpec(num_kv_heads=1, head_dim=DIM, dtype="float32")
cache = PagedKVCache([state, attention], num_blocks=40, num_states=17, block_size=16, max_sequences=8)
scheduler = Scheduler(cache, max_running=8, max_tokens_per_step=96)
states = cache.plane("temporal", layer=0).numpy()[:, 0]  # [num_slots, DIM, DIM], aliases the cache


def extend(before: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after tokens ``x [T, DIM]`` and their outputs; a kernel does this chunk by chunk."""
    outputs = np.empty_like(x)
    for place, token in enumerate(x):
        before = DECAY * before + np.outer(token, token)
        outputs[place] = before @ token / (DIM * DIM)
    return before, outputs


def forward(step: Step) -> np.ndarray:
    """Return the logits of each output of a step."""
    batch = step.batch
    starts, positions = np.asarray(batch.cu_query_lens), np.asarray(batch.positions)
    x = embedding[np.asarray(batch.token_ids)[: batch.num_tokens]]
    mixed = np.empty_like(x)
    for row in range(batch.num_sequences):
        first, end = starts[row], starts[row + 1]
        kept = max(np.asarray(batch.checkpoint_lengths)[row] - positions[first], 0)  # tokens before the checkpoint
        after, mixed[first : first + kept] = extend(states[np.asarray(batch.state_read)[row]], x[first : first + kept])
        if kept:
            states[np.asarray(batch.checkpoint_write)[row]] = after
        after, mixed[first + kept : end] = extend(after, x[first + kept : end])
        states[np.asarray(batch.state_write)[row]] = after
    hidden = (x + mixed)[:, None]  # [T, 1 head, DIM]
    cache.write(1, hidden, hidden, batch)
    hidden = hidden + cache.attend(1, hidden, batch)
    return hidden[starts[np.array(step.output_rows) + 1] - 1, 0] @ head


prefix = random.integers(0, VOCABULARY, 48, np.int32)
for number in range(12):
    question = random.integers(0, VOCABULARY, 10 + 3 * number, np.int32)
    scheduler.add(Request(number, np.concatenate([prefix, question]), max_new_tokens=20))

finished, number = [], 0
while (step := scheduler.schedule()) is not None:
    logits = forward(step)
    number += 1
    if number == 9:
        print("step 9 fails; its sequences return to their checkpoints and compute the tokens after these again")
        scheduler.abandon(step)
        continue
    scheduler.commit(step)
    finished += scheduler.accept(step, logits.argmax(axis=-1))


def from_scratch(tokens: np.ndarray) -> np.ndarray:
    """Return the best next token after each token of a text."""
    x = embedding[tokens]
    x = x + extend(np.zeros((DIM, DIM), np.float32), x)[1]
    scores = np.where(np.tri(len(x), dtype=bool), x @ x.T / np.sqrt(DIM), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return ((x + weights / weights.sum(axis=-1, keepdims=True) @ x) @ head).argmax(axis=-1)


equal = all((from_scratch(run.tokens)[-21:-1] == run.generated).all() for run in finished)
reuse = scheduler.reuse
print(f"{reuse.prefix_hit_tokens} of {reuse.prefix_query_tokens} prompt tokens began with a cached state")
print(f"all tokens of {len(finished)} requests equal those computed from scratch: {equal}")
