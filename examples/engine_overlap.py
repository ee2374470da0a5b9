"""An inference engine that schedules each step before it has read the tokens of the last one.

On a device the host then prepares step n + 1 while the device computes step n. The tokens that step n + 1 needs from
step n stay in a tensor of the device: `Step.unknown_positions` and `Step.unknown_outputs` say where each belongs.
Nothing in the loop waits for the device but the read-back after the launch of the next step. A run that is found
finished afterwards drops its extra token. One forward pass fails and is computed again.

The requests are served with and without overlap. At the end every output is compared with that of the other loop, and
with the same model without a cache; the exit status is 1 if one differs.

Run it: python examples/engine_overlap.py
"""

import sys
from collections import Counter
from time import perf_counter

import torch
from tiny_llama import DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, TinyLlama, first_difference, sample
from torch import Tensor

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.serving import Request, Run, Scheduler, Step

STOP_IDS = (3, 5, 7, 9)


class Engine:
    def __init__(self, model: TinyLlama, *, overlap: bool) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
        self.model = model
        self.cache = PagedKVCache(spec, num_layers=LAYERS, num_blocks=49, block_size=16, max_sequences=16)
        self.scheduler = Scheduler(
            self.cache,
            max_running=12,
            max_tokens_per_step=64,
            swap_space=SwapSpace(self.cache, num_blocks=25),
            overlap=overlap,
        )
        self.counts: Counter[str] = Counter()

    def serve(self) -> list[Run]:
        """Serve the queued requests one step after the other, and return the runs as they finish."""
        finished: list[Run] = []
        while (step := self.scheduler.schedule()) is not None:
            ids = self.try_launch(step, None)
            if ids is not None:
                self.scheduler.commit(step)
                finished += self.accept(step, ids)
        return finished

    def serve_overlapped(self) -> list[Run]:
        """Serve the queued requests, and schedule each step before the ids of the last one are read."""
        finished: list[Run] = []
        last: tuple[Step, Tensor] | None = None  # the open step and its ids, on the device
        while True:
            step = self.scheduler.schedule()
            if step is None and last is None:
                return finished
            ids = None if step is None else self.try_launch(step, None if last is None else last[1])
            if last is not None:
                finished += self.accept(*last)
            if step is not None and ids is not None:
                self.scheduler.commit(step)
                last = step, ids
            else:
                last = None

    def try_launch(self, step: Step, last_ids: Tensor | None) -> Tensor | None:
        """Launch a step; abandon it and return None if that fails. The next step computes its tokens."""
        self.counts["steps"] += 1
        try:
            return self.launch(step, last_ids)
        except RuntimeError as error:
            print(f"step {self.counts['steps']}: {error}")
            self.scheduler.abandon(step)
            return None

    def launch(self, step: Step, last_ids: Tensor | None) -> Tensor:
        """Enqueue a step, and return the tensor that its sampled ids will be in; `last_ids` are those of the last step.

        The host has no queue: here the ids are there when the call returns. On a device no call waits.
        """
        batch = step.batch
        if self.counts["steps"] == 30:
            raise RuntimeError("the device is out of order")

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.cache.write(layer, key, value, batch)
            return self.cache.attend(layer, query, batch)

        arrays = (batch.token_ids, batch.positions, batch.cu_query_lens, batch.seq_lens)
        token_ids, positions, starts, lengths = map(torch.from_dlpack, arrays)
        if last_ids is not None:
            token_ids[torch.from_numpy(step.unknown_positions)] = last_ids[torch.from_numpy(step.unknown_outputs)]
        rows = torch.tensor(step.output_rows, dtype=torch.int64)
        seeds = torch.tensor([seed_of(run) for run in step.outputs], dtype=torch.int64)
        count = batch.num_tokens
        logits = self.model(token_ids[:count], positions[:count], attend, starts[rows + 1] - 1)
        self.counts["computed"] += count
        self.counts["ahead"] += len(step.unknown_positions)
        return sample(logits, seeds, lengths[rows]).to(torch.int32)

    def accept(self, step: Step, ids: Tensor) -> list[Run]:
        """Read ids back, which waits for the step, and pass them to the scheduler."""
        self.counts["sampled"] += len(ids)
        return self.scheduler.accept(step, ids.cpu().numpy())


def seed_of(run: Run) -> int:
    """Return the seed of the noise of a run: a number for each sample of each request."""
    return run.request.id * 16 + run.sample


def make_requests() -> list[Request]:
    """Return requests that begin alike; some end at a stop id, and every fourth has two samples."""
    random = torch.Generator().manual_seed(1)
    system = torch.randint(VOCABULARY, (70,), generator=random)
    requests = []
    for number in range(16):
        prompt = torch.cat([system, torch.randint(VOCABULARY, (9 + 7 * number,), generator=random)])
        requests.append(
            Request(number, prompt.numpy(), 24 + number, samples=1 + (number % 4 == 3), stop_token_ids=STOP_IDS)
        )
    return requests


def main() -> int:
    torch.set_num_threads(1)  # the model is too small for several threads
    model = TinyLlama().eval()
    outputs = []
    for overlap in (False, True):
        engine = Engine(model, overlap=overlap)
        for request in make_requests():
            engine.scheduler.add(request)
        start = perf_counter()
        runs = engine.serve_overlapped() if overlap else engine.serve()
        seconds, counts = perf_counter() - start, engine.counts
        engine.scheduler.check_invariants()
        outputs.append({seed_of(run): run.tokens.tolist() for run in runs})
        generated = sum(run.num_generated for run in runs)
        print(f"{'with' if overlap else 'without'} overlap:")
        print(f"  {counts['steps']} steps, {counts['computed']} tokens computed, {generated / seconds:.0f} tokens/s")
        print(f"  {generated} tokens generated; {counts['sampled'] - generated} more were sampled and dropped")
        print(f"  {counts['ahead']} tokens computed before the host knew their ids")
        reused = engine.scheduler.reuse.prefix_hit_tokens
        print(f"  {engine.scheduler.num_preemptions} preemptions, {reused} prompt tokens reused")

    lengths = {request.id: len(request.prompt) for request in make_requests()}
    wrong = 0
    for seed, text in outputs[1].items():
        if first_difference(model, torch.tensor(text), lengths[seed // 16], seed) is not None:
            wrong += 1
            print(f"the output of seed {seed} differs: {text}")
    stopped = sum(text[-1] in STOP_IDS for text in outputs[1].values())
    is_equal = outputs[0] == outputs[1]
    print(f"{len(outputs[1])} outputs, {stopped} of them ended at a stop id")
    print(f"equal with and without overlap: {is_equal}")
    print(f"every output equals that of the model without a cache: {not wrong}")
    return 0 if is_equal and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
