"""An inference engine around `Scheduler`: a small Llama in torch, served with continuous batching.

The pool is too small for the requests, so that the scheduler preempts runs: some are swapped out, the others computed
again. Prompts are computed in chunks, shared prefixes are reused, requests have parallel samples, one forward pass
fails, one request is cancelled, and others end at a stop id. At the end every output is compared with the same model
without a cache; the exit status is 1 if one differs.

Run it: python examples/engine.py
"""

import sys
from collections import Counter
from time import perf_counter

import torch
from tiny_llama import DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, TinyLlama, first_difference, sample
from torch import Tensor

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.serving import Request, Run, Scheduler, State, Step

STOP_IDS = (3, 5, 7, 9)


class Engine:
    """The loop of an engine: schedule, compute, commit, sample, accept.

    The arrays of a step have fixed addresses, so that their views as tensors are made once. On CUDA a captured graph
    reads them in the same way.
    """

    def __init__(self, model: TinyLlama, *, num_blocks: int, num_swap_blocks: int, max_tokens_per_step: int) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
        self.model = model
        self.cache = PagedKVCache(spec, num_layers=LAYERS, num_blocks=num_blocks, block_size=16, max_sequences=16)
        self.scheduler = Scheduler(
            self.cache,
            max_running=12,
            max_tokens_per_step=max_tokens_per_step,
            swap_space=SwapSpace(self.cache, num_blocks=num_swap_blocks),
        )
        self.counts: Counter[str] = Counter()
        self.failures = {9}  # steps whose forward pass fails

    def add(self, request: Request) -> Run:
        """Queue a request; allowed at any time, also between `schedule` and `accept`."""
        return self.scheduler.add(request)

    def step(self) -> list[Run] | None:
        """Compute one step and return the runs that it finished; None if nothing is running or waiting."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.counts["steps"] += 1
        try:
            logits = self.forward(step)
        except RuntimeError as error:
            print(f"step {self.counts['steps']}: {error}; its tokens are computed again")
            self.scheduler.abandon(step)
            return []
        self.scheduler.commit(step)
        ids = self.sample(step, logits)
        self.counts["computed"] += step.batch.num_tokens
        self.counts["sampled"] += len(ids)
        self.counts["mixed"] += 0 < step.num_decodes < len(step.runs)
        return self.scheduler.accept(step, ids.numpy())

    def forward(self, step: Step) -> Tensor:
        """Return the logits of the outputs of a step ``[len(step.outputs), VOCABULARY]``."""
        batch = step.batch
        if self.counts["steps"] in self.failures:
            raise RuntimeError("the device is out of order")

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.cache.write(layer, key, value, batch)
            return self.cache.attend(layer, query, batch)

        ids, positions = (torch.from_dlpack(part)[: batch.num_tokens] for part in (batch.token_ids, batch.positions))
        # An output is sampled from the last token of its row; the samples of a prompt share a row.
        ends = torch.from_dlpack(batch.cu_query_lens)[torch.tensor(step.output_rows, dtype=torch.int64) + 1]
        return self.model(ids, positions, attend, ends - 1)

    def sample(self, step: Step, logits: Tensor) -> Tensor:
        """Draw a token for each output; noise depends on request, sample and position alone."""
        seeds = torch.tensor([seed_of(run) for run in step.outputs], dtype=torch.int64)
        lengths = torch.from_dlpack(step.batch.seq_lens)[torch.tensor(step.output_rows, dtype=torch.int64)]
        return sample(logits, seeds, lengths)


def seed_of(run: Run) -> int:
    """Return the seed of the noise of a run: greedy for the first request, a number for each sample of the others."""
    return run.request.id * 16 + run.sample if run.request.id else -1


def make_requests() -> list[Request]:
    """Return requests of which each begins with one of two system prompts."""
    random = torch.Generator().manual_seed(1)
    systems = [torch.randint(VOCABULARY, (length,), generator=random) for length in (70, 40)]
    requests = []
    for number in range(16):
        question = torch.randint(VOCABULARY, (9 + 7 * number,), generator=random)
        prompt = torch.cat([systems[number % 2], question])
        samples, stop_ids = 1 + (number % 5 == 4), STOP_IDS if number % 3 == 0 else ()
        requests.append(Request(number, prompt.numpy(), 24 + number, samples, stop_token_ids=stop_ids))
    return requests


def verify(model: TinyLlama, runs: list[Run]) -> bool:
    """Compare each output with the model without a cache; print the first difference of each wrong output."""
    right = True
    for run in runs:
        place = first_difference(model, torch.from_numpy(run.tokens.copy()), len(run.request.prompt), seed_of(run))
        if place is not None:
            print(f"{run!r} differs at position {place}")
            right = False
    return right


def main() -> int:
    torch.set_num_threads(1)  # the model is too small for several threads
    model = TinyLlama().eval()
    engine = Engine(model, num_blocks=45, num_swap_blocks=13, max_tokens_per_step=64)
    requests = make_requests()
    runs = [engine.add(request) for request in requests[:10]]
    ended: list[Run] = []
    start = perf_counter()
    while (finished := engine.step()) is not None:
        ended += finished
        if engine.counts["steps"] == 5:
            runs += [engine.add(request) for request in requests[10:]]
        if engine.counts["steps"] == 20:
            engine.scheduler.cancel(runs[3])
            ended.append(runs[3])
    seconds = perf_counter() - start

    scheduler, counts = engine.scheduler, engine.counts
    scheduler.check_invariants()
    cancelled = sum(run.state is State.CANCELLED for run in ended)
    stopped = sum(run.num_generated < run.request.max_new_tokens for run in ended) - cancelled
    print(f"{len(requests)} requests, {len(ended)} outputs: {cancelled} cancelled, {stopped} ended at a stop id")
    print(f"{counts['steps']} steps, {counts['mixed']} of them with decodes and prompts")
    print(
        f"{counts['computed']} tokens computed, {counts['sampled']} sampled, {counts['sampled'] / seconds:.0f} tokens/s"
    )
    print(f"{scheduler.reuse.prefix_hit_tokens} of {scheduler.reuse.prefix_query_tokens} prompt tokens reused")
    print(f"{scheduler.num_preemptions} preemptions, {scheduler.num_swaps} of them swapped out")
    right = verify(model, ended)
    print(f"every output equals that of the model without a cache: {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
