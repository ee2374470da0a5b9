"""An inference engine around `PagedKVCache` alone, with a loop of its own instead of `Scheduler`.

The loop computes prompts in chunks next to decodes, verifies drafts (speculative decoding), holds a prompt back while
another one computes the prefix that both have, and preempts: sequences are swapped out, or computed again when the
swap space is full. A beam search forks and reorders sequences of the same cache. At the end every output is compared
with the same model without a cache; the exit status is 1 if one differs.

Run it: python examples/engine_cache.py
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter

import torch
from tiny_llama import DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, TinyLlama, first_difference, sample
from torch import Tensor

from pagecore import AttentionSpec, Batch, PagedKVCache, Sequence, SwapSpace

BLOCK_SIZE, MAX_SEQUENCES, MAX_TOKENS, DRAFTS = 16, 8, 64, 3


@dataclass(eq=False)
class Job:
    """A request; `tokens` are the known ones while it has no sequence."""

    prompt: list[int]
    max_new_tokens: int
    seed: int = -1
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None

    @property
    def held(self) -> Sequence:
        """The sequence of a job that runs."""
        assert self.sequence is not None
        return self.sequence

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed yet."""
        return self.held.num_tokens - self.held.num_computed_tokens


class Engine:
    def __init__(self, model: TinyLlama, *, num_blocks: int, num_swap_blocks: int) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
        self.model = model
        self.cache = PagedKVCache(
            spec, num_layers=LAYERS, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=MAX_SEQUENCES
        )
        self.batch = self.cache.make_batch(MAX_SEQUENCES, MAX_TOKENS)  # fixed addresses; every step uses it
        self.space = SwapSpace(self.cache, num_blocks=num_swap_blocks)
        self.waiting: list[Job] = []
        self.running: list[Job] = []  # oldest first
        self.counts: Counter[str] = Counter()

    def compute(self, batch: Batch, ids: Tensor) -> Tensor:
        """Return the logits of every token of a prepared step ``[T, VOCABULARY]``; drafts need all of theirs."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.cache.write(layer, key, value, batch)
            return self.cache.attend(layer, query, batch)

        self.counts["steps"] += 1
        self.counts["computed"] += batch.num_tokens
        return self.model(ids, torch.from_dlpack(batch.positions)[: batch.num_tokens], attend)

    # -- what runs ---------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let waiting jobs run, in order, while rows and blocks last; those that wait for a prefix are passed over."""
        for job in list(self.waiting):
            if len(self.running) == MAX_SEQUENCES:
                return
            if job.sequence is not None:  # swapped out
                # With a block to spare for each job, so that none is preempted in the next step.
                wanted = -(-job.sequence.num_tokens // BLOCK_SIZE) + len(self.running) + 1
                if self.running and self.cache.num_available < wanted:
                    return
                self.cache.swap_in([job.sequence])
            elif self.waits_for_prefix(job.tokens):
                self.counts["held back"] += 1
                continue
            else:
                # From here on the sequence holds its cached prefix.
                job.sequence = self.cache.add_sequence(job.tokens)
                together = [*self.running, job]
                lacking = [each.num_left for each in together]
                if self.running and self.cache.shortage([each.held for each in together], lacking):
                    self.cache.remove(job.sequence)
                    job.sequence = None
                    return
                self.counts["reused"] += job.sequence.num_cached_tokens
            self.waiting.remove(job)
            self.running.append(job)

    def waits_for_prefix(self, tokens: list[int]) -> bool:
        """Return True if a running prompt will soon publish more blocks of `tokens` than are cached now.

        `commit` publishes blocks and `add_sequence` looks for them, so that two prompts that begin alike both compute
        the common part if they are added before the step of the first is committed.
        """
        cached = self.cache.match_length(tokens)
        for other in self.running:
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other.prompt, strict=False)))
            if other.num_left > 1 and min(alike, len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE > cached:
                return True
        return False

    def preempt(self, job: Job) -> None:
        """Free the blocks of a job: swap it out, or forget what it has computed if the swap space is full."""
        self.counts["preempted"] += 1
        if self.cache.try_swap_out([job.held], self.space):
            self.counts["swapped out"] += 1
        else:
            job.tokens = job.held.tokens.tolist()
            self.cache.remove(job.held)  # its published blocks stay cached until others need them
            job.sequence = None
        self.running.remove(job)
        self.waiting.insert(0, job)

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """Compute one step, and return the jobs that it finished."""
        self.admit()
        while True:
            rows = self.choose()
            sequences = [job.held for job, _, _ in rows]
            counts = [known + len(drafts) for _, known, drafts in rows]
            if self.cache.try_prepare(sequences, counts, out=self.batch) is not None:
                break
            self.preempt(self.running[-1])  # the oldest job fits alone, and is never preempted
        with self.batch as batch:  # an exception abandons the step
            ids = torch.from_dlpack(batch.token_ids)[: batch.num_tokens].clone()
            ids[ids < 0] = torch.tensor([draft for _, _, drafts in rows for draft in drafts], dtype=torch.int32)
            positions = torch.from_dlpack(batch.positions)[: batch.num_tokens]
            seeds = torch.tensor([job.seed for job, _, _ in rows]).repeat_interleave(torch.tensor(counts))
            chosen = sample(self.compute(batch, ids), seeds, positions + 1).split(counts)
            new = [self.verify(*row, own.tolist()) for row, own in zip(rows, chosen, strict=True)]
            self.cache.commit(
                batch, accepted=[known + max(len(ids) - 1, 0) for (_, known, _), ids in zip(rows, new, strict=True)]
            )
        self.cache.append_tokens(sequences, new)
        return self.end([job for job, _, _ in rows])

    def choose(self) -> list[tuple[Job, int, list[int]]]:
        """Return (job, number of known tokens, drafts) for each row: decodes first, then chunks of prompts."""
        budget, rows = MAX_TOKENS, []
        for job in sorted(self.running, key=lambda job: job.num_left > 1):
            known = min(job.num_left, budget)
            drafts = self.propose(job)[: budget - known] if job.num_left == 1 else []
            if known:
                rows.append((job, known, drafts))
            budget -= known + len(drafts)
        return rows

    def propose(self, job: Job) -> list[int]:
        """Guess the next tokens: those that followed the last time that the last two tokens came (prompt lookup)."""
        text = job.held.tokens.tolist()
        room = min(DRAFTS, len(job.prompt) + job.max_new_tokens - len(text) - 1)
        for start in range(len(text) - 3, -1, -1):
            if text[start : start + 2] == text[-2:]:
                return text[start + 2 : start + 2 + max(room, 0)]
        return []

    def verify(self, job: Job, known: int, drafts: list[int], chosen: list[int]) -> list[int]:
        """Return the new tokens of a row: the drafts that the model would have chosen, and its own next token."""
        if known < job.num_left:  # a chunk before the end of the prompt
            return []
        own = chosen[known - 1 :]
        good = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, own, strict=False)))
        self.counts["drafted"] += len(drafts)
        self.counts["accepted"] += good
        return own[: good + 1]

    def end(self, jobs: list[Job]) -> list[Job]:
        """Remove the sequences of the jobs that have all their tokens."""
        finished = []
        for job in jobs:
            if job.held.num_tokens == len(job.prompt) + job.max_new_tokens:
                job.tokens = job.held.tokens.tolist()
                self.cache.remove(job.held)
                self.running.remove(job)
                finished.append(job)
        return finished

    # -- beams -------------------------------------------------------------------------------------------------------

    def beam_search(self, prompt: list[int], width: int, length: int) -> list[list[int]]:
        """Return the `width` best texts of `length` new tokens; beams share all blocks that they have in common."""
        first = self.cache.add_sequence(prompt)
        while (left := first.num_tokens - first.num_computed_tokens) > 0:
            with self.cache.prepare([first], min(left, MAX_TOKENS), out=self.batch) as batch:
                logits = self.compute(batch, torch.from_dlpack(batch.token_ids)[: batch.num_tokens])
                self.cache.commit(batch)
        beams, scores = [first], torch.zeros(1)
        logits = logits[-1:]
        for generated in range(length):
            scores, parents, ids = best_beams(scores, logits, width)
            beams += [self.cache.fork(first) for _ in range(width - len(beams))]
            self.cache.reorder(beams, [beams[parent] for parent in parents])
            self.cache.append_tokens(beams, ids)
            if generated < length - 1:
                with self.cache.prepare(beams, 1, out=self.batch) as batch:
                    logits = self.compute(batch, torch.from_dlpack(batch.token_ids)[:width])
                    self.cache.commit(batch)
        texts = [beam.tokens.tolist() for beam in beams]
        for beam in beams:
            self.cache.remove(beam)
        return texts


def best_beams(scores: Tensor, logits: Tensor, width: int) -> tuple[Tensor, list[int], list[int]]:
    """Return the scores, parents and last ids of the `width` best continuations."""
    best = (scores[:, None] + logits.log_softmax(dim=-1)).flatten().topk(width)
    return best.values, (best.indices // VOCABULARY).tolist(), (best.indices % VOCABULARY).tolist()


def beams_without_cache(model: TinyLlama, prompt: list[int], width: int, length: int) -> list[list[int]]:
    texts, scores = [prompt], torch.zeros(1)
    for _ in range(length):
        logits = torch.stack([model.logits(torch.tensor(text))[-1] for text in texts])
        scores, parents, ids = best_beams(scores, logits, width)
        texts = [[*texts[parent], last] for parent, last in zip(parents, ids, strict=True)]
    return texts


def main() -> int:
    torch.set_num_threads(1)  # the model is too small for several threads
    random = torch.Generator().manual_seed(1)
    model = TinyLlama().eval()
    engine = Engine(model, num_blocks=33, num_swap_blocks=17)
    system = torch.randint(VOCABULARY, (70,), generator=random).tolist()
    jobs = []
    for number in range(14):
        question = torch.randint(VOCABULARY, (8 + 9 * (number % 7),), generator=random).tolist()
        jobs.append(Job([*system, *question], max_new_tokens=40, seed=number if number % 2 else -1))
        jobs[-1].tokens = jobs[-1].prompt
    engine.waiting = list(jobs)
    start, finished = perf_counter(), []
    while engine.waiting or engine.running:
        finished += engine.step()
    seconds = perf_counter() - start
    engine.cache.check_invariants()

    counts = engine.counts
    generated = sum(job.max_new_tokens for job in finished)
    print(f"{len(finished)} requests in {counts['steps']} steps: {counts['computed']} tokens computed,")
    print(f"{generated} generated, {generated / seconds:.0f} tokens/s")
    print(f"{counts['reused']} tokens reused; prompts waited {counts['held back']} steps for the prefix of another one")
    print(f"{counts['accepted']} of {counts['drafted']} drafts accepted")
    print(f"{counts['preempted']} preemptions, {counts['swapped out']} of them swapped out")
    wrong = [
        job
        for job in finished
        if first_difference(model, torch.tensor(job.tokens), len(job.prompt), job.seed) is not None
    ]
    for job in wrong:
        print(f"the output of seed {job.seed} differs: {job.tokens}")
    before = counts["computed"]
    beams = engine.beam_search(jobs[0].prompt, width=4, length=20)
    right = beams == beams_without_cache(model, jobs[0].prompt, width=4, length=20)
    print(f"beam search over {counts['computed'] - before} computed tokens: {'equal' if right else 'different'} beams")
    print(f"every output equals that of the model without a cache: {right and not wrong}")
    return 0 if right and not wrong and len(finished) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
