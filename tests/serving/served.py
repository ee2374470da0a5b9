"""An engine with a deterministic model that reads every token of its context from the blocks of the cache.

The next token is a hash of all tokens so far, in order, so that a wrong block, slot or id changes an output. A forward
pass runs when its step is launched, on the token ids that the step before has sampled but the scheduler may not know.
"""

import numpy as np

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec

POISON = -7.0
MODULUS = 1009


def hashed(tokens, sample):
    """Return the next token after `tokens`."""
    value = sample + 1
    for token in tokens:
        value = (value * 31 + int(token) + 7) % MODULUS
    return value


def answer(request, sample=0, ends=lambda run_id, token: False):
    """Return the prompt and all tokens that the model generates after it."""
    text = request.prompt.tolist()
    for number in range(1, request.max_new_tokens + 1):
        text.append(hashed(text, sample))
        may_stop = not request.ignore_eos and number >= request.min_new_tokens
        if ends(request.id, text[-1]) or (may_stop and text[-1] in request.stop_token_ids):
            break
    return text


class Server:
    """Serves requests through a scheduler; `ends(request id, token)` ends a run from outside the scheduler."""

    def __init__(self, *, num_blocks=40, block_size=2, max_sequences=6, swap_blocks=None, cache=None, prefix_cache=True,
                 overlap=False, ends=None, **options):  # fmt: skip
        self.cache = cache or PagedKVCache(
            AttentionSpec(1, 1, dtype="float32"), block_size=block_size, num_blocks=num_blocks,
            max_sequences=max_sequences, prefix_cache=prefix_cache,
        )  # fmt: skip
        space = None if swap_blocks is None else SwapSpace(self.cache, num_blocks=swap_blocks)
        self.scheduler = Scheduler(self.cache, overlap=overlap, swap_space=space, **options)
        self.plane = self.cache.plane("key", 0).numpy().reshape(-1)
        self.plane[:] = POISON
        self.ends = ends
        self.runs, self.ended = {}, {}
        self.previous = self.sampled = None
        self.computed = self.num_ahead = 0

    def add(self, request):
        run = self.runs[request.id, 0] = self.scheduler.add(request)
        return run

    def launch(self, step):
        """Compute a step: write its tokens to the cache, and hash the context of each output."""
        batch = step.batch
        ids = np.asarray(batch.token_ids)[: batch.num_tokens]
        assert (ids[step.unknown_positions] == -1).all()
        if len(step.unknown_positions):
            self.num_ahead += 1
            ids[step.unknown_positions] = self.sampled[step.unknown_outputs]
        assert (ids >= 0).all()
        slots = np.asarray(batch.host.slot_mappings[0])[: batch.num_tokens]
        self.plane[slots[slots >= 0]] = ids[slots >= 0]
        self.computed += sum(step.counts)
        contexts = [self.context(batch, row) if run.held else None for row, run in enumerate(step.runs)]
        self.runs |= {(run.request.id, run.sample): run for run in step.outputs}
        return np.array([
            0 if contexts[row] is None else hashed(contexts[row], run.sample)
            for run, row in zip(step.outputs, step.output_rows, strict=True)
        ], np.int64)  # fmt: skip

    def context(self, batch, row):
        """Return the tokens that a row sees, read through its block table."""
        length = int(np.asarray(batch.host.seq_lens)[row])
        table = np.asarray(batch.group(0).block_table)[int(np.asarray(batch.host.rows)[row])]
        size = self.cache.block_size
        places = np.arange(length)
        found = self.plane[table[places // size] * size + places % size]
        assert (found != POISON).all()
        return found

    def accept(self):
        """Accept the step before; its ids come back from the device only now."""
        step, ids = self.previous, self.sampled
        self.previous = self.sampled = None
        flags = None
        if self.ends is not None:
            flags = [self.ends(run.request.id, token) for run, token in zip(step.outputs, ids.tolist(), strict=True)]
        for run in self.scheduler.accept(step, ids, flags if flags is None else np.array(flags, bool)):
            assert (run.request.id, run.sample) not in self.ended
            self.ended[run.request.id, run.sample] = run.tokens.tolist()

    def turn(self, between=lambda: None):
        """Schedule, launch, accept and commit once; return False at the end."""
        ahead = self.scheduler.overlap
        step = self.scheduler.schedule()
        between()
        ids = None if step is None else self.launch(step)
        between()
        if self.previous is not None:
            self.accept()
            between()
        elif step is None:
            return False
        if step is not None:
            self.scheduler.commit(step)
            self.previous, self.sampled = step, ids
            if not ahead:
                between()
                self.accept()
        return True

    def drain(self, between=lambda: None):
        for _ in range(20_000):
            if not self.turn(between):
                return self.ended
            self.check()
        raise AssertionError("the scheduler makes no progress")

    def check(self):
        self.scheduler.check_invariants()
        self.cache.check_invariants()

    def check_empty(self):
        """Assert that nothing is held after the end."""
        self.check()
        assert self.cache.num_sequences == self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.scheduler.steps
        assert self.cache.stats().num_used_blocks == self.cache.stats().num_swapped_blocks == 0


def add_random_requests(server, choice, longest_answer):
    """Add up to eight requests, some with a common prefix, samples or stop ids, to a server; return them."""
    longest, requests = server.scheduler.max_length, []
    for number in range(choice.randint(1, 8)):
        prompt = choice.randint(1, longest)
        ids = np.arange(prompt) + 100 * number
        ids[: choice.choice([0, 0, 4, 8])] = 5
        most = choice.randint(0, min(longest_answer, longest - prompt + 1))
        one = Request(
            number, ids, most, choice.randint(1, min(3, server.scheduler.max_running)),
            min_new_tokens=choice.randint(0, most),
            stop_token_ids=[choice.randrange(1009) for _ in range(choice.choice([0, 300]))],
            ignore_eos=choice.random() < 0.3,
        )  # fmt: skip
        requests.append(one)
        server.add(one)
    return requests
