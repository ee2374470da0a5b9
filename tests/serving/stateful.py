"""A fake recurrent model for schedulers: its state is a hash of all tokens, so that a wrong state shows at once."""

import numpy as np

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec, Plane, StateSpec

MODULUS = 1009
POISON = 777_777


def digest(tokens, state=0):
    """Return the state after `tokens`; it depends on the value and the place of each token."""
    for token in tokens:
        state = (state * 31 + int(token) + 7) % MODULUS
    return state


def expected(request, sample):
    """Return the prompt and the tokens that the model generates after it."""
    text = request.prompt.tolist()
    for _ in range(request.max_new_tokens):
        text.append((digest(text) + 17 * sample) % MODULUS)
    return text


def request_of(number, prompt, new, samples=1, shared=0):
    """Return a request whose prompt begins with `shared` tokens that all requests have in common."""
    text = np.arange(number * 100, number * 100 + prompt)
    text[:shared] = np.arange(prompt)[:shared]
    return Request(number, text, new, samples)


class StatefulEngine:
    """Serves requests from a hybrid cache whose states it computes itself, and checks every token at the end."""

    def __init__(
        self, *, num_blocks=40, num_states=12, block_size=2, chunk=4, interval=8, in_place=True, swap=False,
        max_running=6, max_tokens_per_step=24, max_tokens=64, prefix_cache=True, windows=(None,), headroom=0.0,
        states_per_run=None, overlap=False,
    ):  # fmt: skip
        states = StateSpec((Plane("hash", (1,), "int32", per="sequence"),), chunk=chunk, interval=interval,
                           in_place=in_place)  # fmt: skip
        specs = [AttentionSpec(1, 8, dtype="float32", window=window) for window in windows]
        self.layer = len(specs)
        self.cache = PagedKVCache(
            [*specs, states], block_size=block_size, num_blocks=num_blocks, num_states=num_states,
            max_sequences=max_running, max_tokens_per_sequence=max_tokens, prefix_cache=prefix_cache,
        )  # fmt: skip
        self.space = SwapSpace(self.cache, num_blocks=4 * num_blocks) if swap else None
        self.scheduler = Scheduler(
            self.cache, max_running=max_running, max_tokens_per_step=max_tokens_per_step, headroom=headroom,
            swap_space=self.space, states_per_run=states_per_run, overlap=overlap,
        )  # fmt: skip
        self.requests, self.ended = [], {}
        self.checkpoints = self.reused = self.computed = 0
        self.poison()

    @property
    def states(self):
        return self.cache.plane("hash", self.layer).numpy()[:, 0]

    def poison(self):
        """Fill every slot but the null slot with garbage that no step may read."""
        self.states[1:] = POISON

    def add(self, request):
        self.requests.append(request)
        return self.scheduler.add(request)

    def compute(self, step, unknown=None):
        """Extend the state of each row by its tokens, and keep the state at its checkpoint."""
        batch, states = step.batch, self.states
        read, write = np.asarray(batch.state_read), np.asarray(batch.state_write)
        kept, lengths = np.asarray(batch.checkpoint_write), np.asarray(batch.checkpoint_lengths)
        positions, starts = np.asarray(batch.positions), np.asarray(batch.cu_query_lens)
        for row, (run, count) in enumerate(zip(step.runs, step.counts, strict=True)):
            if run.held is None:  # cancelled after the prepare: its slots may belong to others
                continue
            before = int(positions[starts[row]])
            tokens = np.asarray(run.held.tokens)[before : before + count].tolist()
            if len(tokens) < count:
                tokens.append(unknown[row])
            state = int(states[read[row]])
            assert state != POISON
            cut = max(int(lengths[row]) - before, 0)
            state = digest(tokens[:cut], state)
            if cut:
                states[kept[row]] = state
                self.checkpoints += 1
            states[write[row]] = digest(tokens[cut:], state)
            self.computed += count

    def compute_ahead(self, step, previous, ids):
        """Compute a step whose decodes may have unknown ids: those that `previous` sampled."""
        known = dict(zip(step.unknown_positions.tolist(), step.unknown_outputs.tolist(), strict=True))
        self.compute(step, {row: ids[place] for row, place in known.items()})

    def spoil(self, step):
        """Overwrite what the step may write, as a pass that fails halfway does."""
        for slots in (step.batch.state_write, step.batch.checkpoint_write):
            used = np.asarray(slots)[: step.batch.num_sequences]
            self.states[used[used > 0]] = POISON

    def ids(self, step):
        """Return the next token of each output, read from the states."""
        write = np.asarray(step.batch.state_write)
        states = self.states
        return [
            0 if run.has_ended else (int(states[write[row]]) + 17 * run.sample) % MODULUS
            for run, row in zip(step.outputs, step.output_rows, strict=True)
        ]

    def finish(self, step):
        """Compute, commit and accept a step."""
        self.compute(step)
        ids = self.ids(step)
        self.scheduler.commit(step)
        for run in self.scheduler.accept(step, ids):
            self.ended[run.request.id, run.sample] = run.tokens.tolist()

    def check(self):
        self.scheduler.check_invariants()
        self.cache.check_invariants()

    def drain(self, observe=lambda step: None):
        """Serve until no request is left."""
        for _ in range(10_000):
            step = self.scheduler.schedule()
            if step is None:
                return
            observe(step)
            self.finish(step)
            self.check()
        raise AssertionError("the scheduler makes no progress")

    def check_tokens(self, cancelled=()):
        """Assert that every sample of every request has the tokens of the model."""
        for request in self.requests:
            for sample in range(request.samples if request.max_new_tokens else 1):
                if request.id in cancelled:
                    continue
                assert self.ended.pop((request.id, sample)) == expected(request, sample), (request.id, sample)
        assert {number for number, _ in self.ended} <= set(cancelled)
