"""An inference engine with speculative decoding: n-gram drafts, verified in the same steps as chunks of prompts.

The drafter looks for the last tokens of a text earlier in the text, and proposes what followed them there ("prompt
lookup"). Texts that repeat themselves, as code, summaries and greedy outputs do, gain several tokens a step; the others
lose nothing but the computation of a few rows. The number of drafts of a run follows its success. `--tree` proposes two
continuations, in one tree.

The same requests are served with and without drafts. At the end every output is compared with that of the other engine,
and with the same model without a cache; the exit status is 1 if one differs.

Run it: python examples/engine_speculation.py [--tree]
"""

import sys
from collections import Counter
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_llama import DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, TinyLlama, first_difference, sample
from torch import Tensor

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.serving import DraftTree, Request, Run, Scheduler, Step

STOP_IDS = (3, 5, 7, 9)
NGRAM, DRAFTS = 2, 6
Ids = NDArray[np.int32]


class Drafter:
    """Drafts from earlier occurrences of the last `NGRAM` tokens of a text."""

    def __init__(self, *, trees: bool) -> None:
        self.trees = trees
        self.most: dict[Run, int] = {}  # drafts of the next step: more after a success, fewer after a failure

    def propose(self, run: Run) -> Ids | DraftTree | None:
        """Return the drafts of a decoding run; None without an earlier occurrence."""
        text = run.sequence.tokens
        most = self.most.get(run, 2)
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], NGRAM)
        ends = np.flatnonzero((windows == text[-NGRAM:]).all(axis=1)) + NGRAM
        if not len(ends):
            return None
        newest = text[ends[-1] : ends[-1] + most]
        others = [end for end in ends if text[end] != newest[0]]
        if not self.trees or not others:
            return newest
        other = text[others[-1] : others[-1] + most]
        parents = np.arange(-1, len(newest) + len(other) - 1)
        parents[len(newest)] = -1  # the second continuation, too, follows the last token
        return DraftTree(parents, np.concatenate([newest, other]))

    def learn(self, run: Run, num_drafts: int, num_gained: int) -> None:
        """Adapt the number of drafts of a run to what a step has accepted."""
        if num_drafts:
            most = self.most.get(run, 2)
            self.most[run] = min(most + 1, DRAFTS) if num_gained > num_drafts // 2 else max(most // 2, 1)


class Engine:
    def __init__(self, model: TinyLlama, drafter: Drafter | None) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
        self.model, self.drafter = model, drafter
        self.cache = PagedKVCache(spec, num_layers=LAYERS, num_blocks=49, block_size=16, max_sequences=16)
        self.scheduler = Scheduler(
            self.cache,
            max_running=12,
            max_tokens_per_step=64,
            swap_space=SwapSpace(self.cache, num_blocks=25),
            max_tree_tokens=64 if drafter is not None and drafter.trees else 0,
        )
        self.counts: Counter[str] = Counter()

    def serve(self) -> list[Run]:
        """Serve the queued requests, and return the runs as they finish."""
        finished: list[Run] = []
        while (step := self.scheduler.schedule(self.propose())) is not None:
            rows, paths = self.verify(step, self.forward(step))
            if not step.has_drafts:
                self.scheduler.commit(step)
            elif step.parents is None:
                self.scheduler.commit(step, [len(row) for row in rows])
            else:
                self.scheduler.commit(step, accepted_path=paths)
            finished += self.scheduler.accept(step, rows)
            self.counts["steps"] += 1
            self.counts["mixed"] += step.has_drafts and len(step.runs) > step.num_decodes
        return finished

    def propose(self) -> dict[Run, Ids | DraftTree]:
        """Return the drafts of the runs that decode."""
        if self.drafter is None:
            return {}
        proposed = {run: self.drafter.propose(run) for run in self.scheduler.running if not run.prefilling}
        return {run: drafts for run, drafts in proposed.items() if drafts is not None}

    def forward(self, step: Step) -> Tensor:
        """Return the logits ``[T, VOCABULARY]`` of all tokens of a step, drafts included."""
        batch = step.batch

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.cache.write(layer, key, value, batch)
            return self.cache.attend(layer, query, batch)

        ids, positions = (torch.from_dlpack(part)[: batch.num_tokens] for part in (batch.token_ids, batch.positions))
        self.counts["computed"] += batch.num_tokens
        return self.model(ids, positions, attend)

    def verify(self, step: Step, logits: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids that each output gains, and the accepted tokens of its row.

        The model's choice after each token depends on request, sample and position alone, so that a draft is accepted
        if it is the token that would have been drawn without drafts.
        """
        ends = np.asarray(step.batch.cu_query_lens)
        token_ids, positions = np.asarray(step.batch.token_ids), torch.from_dlpack(step.batch.positions)
        rows, paths = [], []
        for place, (run, row) in enumerate(zip(step.outputs, step.output_rows, strict=True)):
            first, count = ends[row], step.counts[row]
            parents = None if step.parents is None else step.parents[row]
            if row >= step.num_decodes:  # only the token after the prompt is wanted
                first, count = ends[row + 1] - 1, 1
            seeds = torch.full((count,), seed_of(run))
            chosen = sample(logits[first : first + count], seeds, positions[first : first + count] + 1).tolist()
            drafts = token_ids[first : first + count].tolist()
            path = walk(chosen, drafts, np.arange(-1, count - 1) if parents is None else parents)
            rows.append([chosen[at] for at in path])
            paths.append(path)
            if self.drafter is not None and place < step.num_decodes:
                self.drafter.learn(run, count - 1, len(path))
        return rows, paths


def walk(chosen: list[int], drafts: list[int], parents: NDArray[np.int64]) -> list[int]:
    """Return the indices of the accepted tokens: from token 0 down to children that are the model's own choices."""
    path = [0]
    for at in range(1, len(drafts)):
        if parents[at] == path[-1] and drafts[at] == chosen[path[-1]]:
            path.append(at)
    return path


def seed_of(run: Run) -> int:
    """Return the seed of the noise of a run: greedy for every second request, a number for each sample of others."""
    return run.request.id * 16 + run.sample if run.request.id % 2 else -1


def make_requests() -> list[Request]:
    """Return requests whose prompts repeat a phrase; some end at a stop id, and every fourth has two samples."""
    random = torch.Generator().manual_seed(1)
    system = torch.randint(VOCABULARY, (40,), generator=random)
    requests = []
    for number in range(16):
        phrase = torch.randint(VOCABULARY, (3 + number,), generator=random)
        prompt = torch.cat([system, phrase.repeat(4)])
        stop_ids = STOP_IDS if number % 3 == 0 else ()
        requests.append(
            Request(number, prompt.numpy(), 60 + number, samples=1 + (number % 4 == 3), stop_token_ids=stop_ids)
        )
    return requests


def main(*, trees: bool = False) -> int:
    torch.set_num_threads(1)  # the model is too small for several threads
    model = TinyLlama().eval()
    outputs = []
    for drafter in (None, Drafter(trees=trees)):
        engine = Engine(model, drafter)
        for request in make_requests():
            engine.scheduler.add(request)
        start = perf_counter()
        runs = engine.serve()
        seconds, counts, scheduler = perf_counter() - start, engine.counts, engine.scheduler
        scheduler.check_invariants()
        outputs.append({(run.request.id, run.sample): run for run in runs})
        generated = sum(run.num_generated for run in runs)
        print(f"{'without' if drafter is None else 'with'} drafts:")
        print(f"  {generated} tokens in {counts['steps']} steps, {generated / seconds:.0f} tokens/s")
        print(f"  {counts['computed']} tokens computed, {scheduler.num_preemptions} preemptions")
        if drafter is not None:
            figures = scheduler.speculation
            print(f"  {figures.num_accepted_tokens} of {figures.num_draft_tokens} drafts accepted")
            print(
                f"  {figures.mean_tokens:.2f} tokens a row with drafts, {counts['mixed']} steps with drafts and prompts"
            )

    wrong = 0
    for run in outputs[1].values():
        text = torch.from_numpy(run.tokens.copy())
        if first_difference(model, text, len(run.request.prompt), seed_of(run)) is not None:
            wrong += 1
            print(f"{run!r} differs from the model without a cache")
    texts = [{name: run.tokens.tolist() for name, run in found.items()} for found in outputs]
    print(f"equal with and without drafts: {texts[0] == texts[1]}")
    print(f"every output equals that of the model without a cache: {not wrong}")
    return 0 if texts[0] == texts[1] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main(trees="--tree" in sys.argv[1:]))
