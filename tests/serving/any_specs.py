"""An engine over a cache of any layers, which checks every key and state that a step may read.

The first bytes of each token's first plane hold a digest of all tokens up to it, and so does each state. A wrong block,
slot, window or prefix therefore shows at once; the next token is a digest, too.
"""

import random

import numpy as np

from pagecore import AttentionSpec, LatentSpec, PagedKVCache, StateSpec, SwapSpace
from pagecore.serving.scheduling.request import Request, RequestError
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import Plane
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers

MODULUS = 65_521
POISON = 777_777
FORMATS = ["int8_token", "int4_token", "float8_token", "fp4_block16", "mxfp8", "float8_e4m3fn"]


def digests(tokens, state):
    """Return the digest after each token."""
    found = []
    for token in tokens:
        state = (state * 31 + int(token) + 7) % MODULUS
        found.append(state)
    return found


def next_token(text, sample):
    return (digests(text, 1)[-1] + 17 * sample) % 1009


def answer(request, sample):
    """Return the prompt and the tokens that the engine generates after it."""
    text = request.prompt.tolist()
    for number in range(1, request.max_new_tokens + 1):
        text.append(next_token(text, sample))
        may_stop = not request.ignore_eos and number >= request.min_new_tokens
        if may_stop and text[-1] in request.stop_token_ids:
            break
    return text


def draw_attention(draw):
    kind = draw.choice(["full", "window", "sinks", "chunk", "latent", "format"])
    limits = {"window": draw.randint(1, 14)} if kind in ("window", "sinks") or draw.random() < 0.3 else {}
    if kind == "latent":
        return LatentSpec(16, 8, 2, scale=0.2, dtype=draw.choice(["float32", "bfloat16"]))
    if kind == "format":
        rotations = {name: draw.choice([None, "hadamard"]) for name in ("key_rotation", "value_rotation")}
        return AttentionSpec(2, 32, dtype="bfloat16", format=draw.choice(FORMATS), **limits, **rotations)
    if kind == "chunk":
        limits = {"chunk": draw.randint(1, 14)}
    if kind == "sinks":
        limits["sink_tokens"] = draw.randint(1, 9)
    if limits and kind != "full":
        limits["lookahead"] = draw.choice([0, 0, min(2, *limits.values())])
    return AttentionSpec(1, 8, draw.choice([8, 4]), dtype=draw.choice(["float32", "float16"]), **limits)


def draw_layers(draw):
    layers = [draw_attention(draw) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.4:
        chunk = draw.choice([1, 2, 3, 4, 6])
        rules = {"chunk": chunk, "interval": chunk * draw.randint(1, 3), "in_place": draw.random() < 0.6}
        layers = layers if draw.random() < 0.8 else []
        layers.insert(draw.randint(0, len(layers)), StateSpec((Plane("hash", (1,), "int32", per="sequence"),), **rules))
    return layers


class AnyEngine:
    """Serves random requests from a random cache until none is left."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.layers = self.draw_layers()
        self.state = next((n for n, spec in enumerate(self.layers) if isinstance(spec, StateSpec)), None)
        block_size = draw.choice([1, 2, 3, 4, 5, 8])
        self.has_blocks = len(self.layers) > (self.state is not None)
        reuses = draw.random() < 0.85
        self.cache = PagedKVCache(
            self.layers, block_size=block_size, max_sequences=draw.choice([1, 2, 4, 8]), prefix_cache=reuses,
            eviction_policy=draw.choice(["lru", "lfu", "fifo", "slru", "mru", "filo"]),
            recompute_last_block=draw.random() < 0.2,
            max_tokens_per_sequence=draw.choice([24, 48, 80]) if draw.random() < 0.5 or not self.has_blocks else None,
            **self.sizes(draw.choice([6, 10, 16, 40]) * max(1, 8 // block_size) + 2, draw.choice([3, 4, 6, 9, 16])),
        )  # fmt: skip
        space = None
        if draw.random() < 0.45:
            space = SwapSpace(self.cache, **self.sizes(draw.choice([3, 8, 30]), draw.choice([2, 3, 6])))
        self.tiers = None
        if reuses and draw.random() < 0.4:
            host = HostTier(self.cache, **self.sizes(draw.choice([6, 12, 60]), draw.choice([3, 6])))
            write = draw.choice(["through", "second_hit", "on_release", "on_evict"])
            self.tiers = Tiers(self.cache, host, write=write, min_tokens=draw.choice([0, 1, 4]))
        self.scheduler = Scheduler(self.cache, swap_space=space, **self.options())
        self.keys = {n: self.bytes_of(n, spec) for n, spec in enumerate(self.layers) if n in self.attending()}
        if self.state is not None:
            self.states = self.cache.plane("hash", self.state).numpy()[:, 0]
            self.states[1:] = POISON
        self.runs, self.requests, self.ended, self.last, self.cancelled = {}, {}, {}, {}, set()
        self.previous = self.sampled = None

    def draw_layers(self):
        return draw_layers(self.draw)

    def attending(self):
        """Return the layers that attend to the tokens of their sequence."""
        return [layer for layer in range(len(self.layers)) if layer != self.state]

    def encoder_options(self):
        """Return the options of a request that concern its encoder's input."""
        return {}

    def origin(self, request):
        """Return the digest before the first token: requests of different origins share no prefix."""
        return 3 if request.namespace else 1

    def sizes(self, blocks, states):
        sizes = {"num_blocks": blocks} if self.has_blocks else {}
        return sizes if self.state is None else sizes | {"num_states": states}

    def options(self):
        draw = self.draw
        policy = draw.choice(["fcfs", "fcfs", "lpm", "priority", "priority"])
        return {
            "max_running": draw.choice([1, 2, 5, 8]),
            "max_tokens_per_step": draw.choice([1, 2, 5, 9, 30]),
            "headroom": draw.choice([0.0, 0.01, 0.2]),
            "overlap": draw.random() < 0.4,
            "policy": policy,
            "max_wait_steps": draw.choice([1, 5, 1000]),
            "max_prefill_tokens": draw.choice([None, None, 1, 3, 8]),
            "chunked_prefill_size": draw.choice([None, None, 1, 2, 5]),
            "share_prompts": draw.random() < 0.7,
            "new_token_ratio": draw.choice([None, None, 0.7, 0.3]),
            "preemption_threshold": draw.choice([None, 0, 1]) if policy == "priority" else None,
        }

    def bytes_of(self, layer, spec):
        """Return the bytes of the first plane of a layer: ``[blocks, tokens, bytes of the first head]``."""
        array = self.cache.plane(spec.planes[0].name, layer).numpy().view(np.uint8)
        array = array if array.ndim == 3 else array[:, :, 0]
        array[1:] = 0xEE
        return array

    def add(self):
        draw, number = self.draw, len(self.requests)
        count = draw.randint(1, draw.choice([2, 17, 40, 40]))
        ids = np.arange(count) + 100 * number
        shared = draw.choice([0, 9, 20, 40, 40])
        ids[:shared] = np.arange(count)[:shared]
        if self.ended and draw.random() < 0.2:  # the next turn of a chat
            ids = np.array(self.ended[draw.choice(sorted(self.ended))] + [7] * draw.randint(1, 4))
        new = draw.choice([0, 1, 3, 8, 15])
        request = Request(
            number, ids, new, draw.choice([1, 1, 1, 2, 3]), namespace=draw.choice([None, None, None, "a"]),
            stop_token_ids=range(0, 1009, 9) if draw.random() < 0.3 else (), min_new_tokens=draw.randint(0, new),
            ignore_eos=draw.random() < 0.2, priority=draw.randint(-2, 2), resumable=draw.random() < 0.3,
            **self.encoder_options(),
        )  # fmt: skip
        try:
            self.runs[number, 0] = self.scheduler.add(request)
        except RequestError:  # larger than the cache
            return
        self.requests[number] = request
        if self.tiers and draw.random() < 0.2:
            self.scheduler.wait_for(self.runs[number, 0], self.tiers.request(ids, namespace=request.namespace))

    def cancel(self):
        name = self.draw.choice(sorted(self.runs))
        run = self.runs[name]
        if self.scheduler.cancel(run):
            samples = range(run.request.samples) if run.samples > 1 else ()
            self.cancelled |= {name, *((name[0], sample) for sample in samples)}

    def next_turns(self, *, is_end=False):
        """Give some idle runs another turn, and finish others; at the end all of them have one or are finished."""
        steps = self.scheduler.steps
        for run in self.scheduler.idle:
            if not is_end and (self.draw.random() < 0.7 or any(run in step.runs for step in steps)):
                continue
            drops = self.draw.random() < 0.4
            known = run.tokens[: -1 if drops and run.num_generated else None].tolist()
            new = [self.draw.randint(1, 900) for _ in range(self.draw.choice([1, 2, 9]))]
            try:
                if self.draw.random() < 0.3:
                    raise RequestError("the chat ends")
                self.scheduler.extend(run, new, drop_last=drops)
                assert run.request.prompt.tolist() == known + new
            except RequestError:  # or the next turn is larger than the cache
                assert self.scheduler.finish(run)
            self.check()

    def evict_prefix(self):
        request = self.draw.choice(list(self.requests.values()))
        ids, free = answer(request, 0), self.cache.stats().num_free_blocks
        names = {"namespace": request.namespace, "cross_digest": request.cross_digest}
        if self.draw.random() < 0.3:
            (self.tiers or self.cache).revoke_prefix(ids, valid=self.draw.choice([0, 5, 17]), **names)
            self.check()
            return
        freed = self.cache.evict_prefix(ids, keep=self.draw.choice([0, 0, 5, 17]), **names)
        assert self.cache.stats().num_free_blocks == free + freed
        self.check()

    # -- a step ----------------------------------------------------------------------------------------------------

    def launch(self, step):
        """Write the digests of a step and check those that it reads; return the next tokens."""
        batch = step.batch
        ids = np.asarray(batch.token_ids)[: batch.num_tokens].copy()
        if len(step.unknown_positions):
            ids[step.unknown_positions] = self.sampled[step.unknown_outputs]
        starts, positions = np.asarray(batch.host.cu_query_lens), np.asarray(batch.host.positions)
        texts = []
        for row, (run, count) in enumerate(zip(step.runs, step.counts, strict=True)):
            if run.held is None:  # cancelled after the prepare
                texts.append(None)
                continue
            before = int(positions[starts[row]])
            text = run.held.tokens[:before].tolist() + ids[starts[row] : starts[row] + count].tolist()
            texts.append((before, text, digests(text, self.origin(run.request))))
        for layer in self.keys:
            self.write(batch, layer, texts, starts)
        for layer in self.attending():
            self.check_keys(batch, layer, self.layers[layer], texts)
        if self.state is not None:
            self.move_states(batch, texts)
        self.runs |= {(run.request.id, run.sample): run for run in step.outputs}
        found = [
            0 if texts[row] is None else next_token(texts[row][1], run.sample)
            for run, row in zip(step.outputs, step.output_rows, strict=True)
        ]
        return np.array(found, np.int64)

    def write(self, batch, layer, texts, starts):
        slots, size = np.asarray(batch.group(layer).slot_mapping), self.cache.block_size
        for row, entry in enumerate(texts):
            for number, value in enumerate(entry[2][entry[0] :] if entry else ()):
                slot = int(slots[starts[row] + number])
                if slot >= 0:
                    self.keys[layer][slot // size, slot % size, :2] = value & 255, value >> 8

    def check_keys(self, batch, layer, spec, texts):
        table, rows = np.asarray(batch.group(layer).block_table), np.asarray(batch.host.rows)
        size = self.cache.block_size
        for row, entry in enumerate(texts):
            for place in sorted(seen(spec, *entry[:2])) if entry else ():
                block = int(table[rows[row]][place // size])
                assert block > 0, (spec, place)
                held = self.keys[layer][block, place % size, :2].tolist()
                assert held == [entry[2][place] & 255, entry[2][place] >> 8], (spec, place)

    def move_states(self, batch, texts):
        slots = batch.state_read, batch.state_write, batch.checkpoint_write, batch.checkpoint_lengths
        for row, entry in enumerate(texts):
            if entry is None:
                continue
            read, written, kept, length = (int(np.asarray(each)[row]) for each in slots)
            assert not entry[0] or self.states[read] == entry[2][entry[0] - 1]
            if kept:
                self.states[kept] = entry[2][length - 1]
            self.states[written] = entry[2][-1]

    def turn(self):
        """Schedule, launch, accept and commit once; return False if there is nothing to do."""
        step = self.scheduler.schedule()
        self.check()
        if step is not None and self.draw.random() < 0.05:
            self.cancel()
        ids = None if step is None else self.launch(step)
        if step is not None and self.draw.random() < 0.06:
            if self.state is not None:
                written = np.asarray(step.batch.state_write)[: len(step.runs)]
                self.states[written[written > 0]] = POISON
            self.scheduler.abandon(step)
            step = None
        elif self.previous is None and step is None:
            return False
        if self.previous is not None:
            self.accept()
        if step is not None:
            self.scheduler.commit(step)
            self.previous, self.sampled = step, ids
            if not self.scheduler.overlap:
                self.accept()
        self.check()
        return True

    def accept(self):
        step, self.previous = self.previous, None
        for run in self.scheduler.accept(step, self.sampled):
            name = run.request.id, run.sample
            assert name not in self.ended or self.requests[run.request.id].resumable
            self.ended[name], self.last[name] = run.tokens.tolist(), run.request

    def check(self):
        self.scheduler.check_invariants()
        (self.tiers or self.cache).check_invariants()

    def serve(self, count):
        """Serve `count` requests, and check every token and that nothing is held at the end."""
        for _ in range(6000):
            if count and self.draw.random() < 0.4:
                count -= 1
                self.add()
            if self.runs and self.draw.random() < 0.02:
                self.cancel()
            if self.draw.random() < 0.005:
                self.cache.clear_prefix_cache()
            if self.requests and self.draw.random() < 0.02:
                self.evict_prefix()
            self.next_turns()
            if self.tiers and self.draw.random() < 0.5:
                self.tiers.poll()
            if not self.turn() and not count and not self.scheduler.num_loading:
                self.next_turns(is_end=True)
                if not self.scheduler.waiting:
                    break
        else:
            raise AssertionError("the scheduler makes no progress")
        assert not self.scheduler.running + self.scheduler.waiting + self.scheduler.idle
        stats = self.cache.stats()
        assert (stats.num_sequences, stats.num_used_blocks, stats.num_swapped_blocks) == (0, 0, 0)
        if self.tiers:
            assert self.tiers.drain(10)
            self.tiers.close()
        for request in self.requests.values():
            for sample in range(request.samples if request.max_new_tokens else 1):
                name = request.id, sample
                if name not in self.cancelled and (name in self.ended or (request.id, 0) not in self.cancelled):
                    assert self.ended[name] == answer(self.last[name], sample)


def seen(spec, before, text):
    """Return the positions that the queries from `before` on attend to."""
    window, chunk = getattr(spec, "window", None), getattr(spec, "chunk", None)
    sinks, found = getattr(spec, "sink_tokens", 0), set()
    for query in range(before, len(text)):
        first = query // chunk * chunk if chunk else max(0, query - window + 1) if window else 0
        found.update(range(first, query + 1), range(min(sinks, query + 1)))
    return found
