"""A random walk of a paged cache next to a plain model: every slot, every state, and wrong content that is revoked.

The key of a token is a number that its namespace, media and all ids before it determine. A step may compute wrong
numbers from some token on, and what follows them is wrong, too. The engine then revokes the prefix, and no later
sequence may find a wrong number.
"""

import numpy as np

from pagecore import (
    AttentionSpec,
    OutOfBlocks,
    PagedKVCache,
    StateSpec,
    SwapSpace,
    TensorParallel,
    UnsupportedOption,
)
from tests.cache.caches import learn
from tests.cache.walk_model import Twin, digest, draw_layers

NAMES = [None, None, "adapter", ("adapter", 1)]
POLICIES = ["lru", "lfu", "fifo", "slru", "mru", "filo", "priority", "rank"]
ROOM = 44  # tokens of a pool
MOST = 6  # sequences


class Walk:
    def __init__(self, seed):
        self.random = random = np.random.default_rng(seed)
        self.layers, self.rules = draw_layers(random)
        self.attending = [layer for layer, spec in enumerate(self.layers) if isinstance(spec, AttentionSpec)]
        size, policy = int(random.choice([1, 2, 3, 4, 8])), POLICIES[random.integers(len(POLICIES))]
        blocks = -(-ROOM // size) + 2
        options = {"num_blocks": int(blocks * random.choice([1, 2]))} if self.attending else {}
        options |= {} if self.rules is None else {"num_states": int(random.integers(4, 14))}
        if self.rules is None and random.integers(2):
            options["parallel"] = TensorParallel(1, 2)
        self.values = {"priority": {"priority": 20.0}, "rank": {"rank": 3.0}}.get(policy, {})
        self.cache = PagedKVCache(
            self.layers,
            block_size=size,
            max_sequences=MOST,
            max_tokens_per_sequence=size * (blocks + 3),
            eviction_policy=policy,
            scrub=bool(random.integers(2)),
            recompute_last_block=random.random() < 0.2,
            clock=lambda: 0.0,
            **options,
        )
        states = {} if self.rules is None else {"num_states": 5}
        self.space = SwapSpace(self.cache, **({"num_blocks": blocks} if self.attending else {}), **states)
        self.twins, self.pins = {}, []
        self.num_reused = self.num_revoked = 0

    def run(self, steps):
        moves = [self.add] * 5 + [self.step] * 7 + [self.remove] * 4 + [self.truncate, self.swap, self.tidy] * 2
        moves += [self.fork, self.fork, self.reorder, self.learn_late]
        for _ in range(steps):
            moves[self.random.integers(len(moves))]()
            self.check()
        for sequence in self.twins:
            self.cache.remove(sequence)
        for pin in self.pins:
            pin.release()
        self.cache.clear_prefix_cache()
        stats = self.cache.stats()
        assert (stats.num_free_blocks, stats.num_free_states) == (stats.num_blocks, stats.num_states)

    def resident(self):
        return [sequence for sequence in self.twins if not sequence.is_swapped]

    def pick(self, most, among=None):
        among = self.resident() if among is None else among
        count = min(len(among), int(self.random.integers(1, most + 1)))
        return [among[i] for i in self.random.permutation(len(among))[:count]]

    def prompt(self):
        ids = [int(bit) for bit in "010011010001101110100101111010"[: self.random.integers(0, 30)]]
        if self.random.random() < 0.2 and ids:
            ids[self.random.integers(len(ids))] = 2
        return ids, NAMES[self.random.integers(len(NAMES))]

    # Sequences.

    def add(self):
        if len(self.twins) == MOST:
            return
        ids, namespace = self.prompt()
        span = (1, 3, b"image") if len(ids) > 3 and self.random.random() < 0.25 else None
        twin = Twin(namespace, span, ids)
        kind = self.random.choice(["int32", "int64", "uint8"])
        given = np.repeat(np.array(ids, kind), 2)[::2]
        options = self.values if self.random.integers(2) else {}
        sequence = self.cache.add_sequence(given, namespace=namespace, spans=twin.spans, **options)
        twin.numbers = twin.following(sequence.num_cached_tokens)
        self.num_reused += twin.computed
        self.twins[sequence] = twin

    def fork(self):
        for parent in self.pick(1) if len(self.twins) < MOST else ():
            self.twins[self.cache.fork(parent)] = self.twins[parent].copy()

    def reorder(self):
        children = self.pick(3)
        parents = [self.pick(1)[0] for _ in children]
        self.cache.reorder(children, parents)
        self.twins |= dict(zip(children, [self.twins[parent].copy() for parent in parents], strict=True))

    def truncate(self):
        for sequence in self.pick(1):
            twin = self.twins[sequence]
            self.cut(sequence, int(self.random.integers(max(twin.known, twin.computed) + 1)))

    def cut(self, sequence, length):
        """Truncate a sequence, to nothing if it cannot be continued after `length` tokens."""
        try:
            self.cache.truncate(sequence, length)
        except UnsupportedOption:
            length = 0
            self.cache.truncate(sequence, length)
        twin = self.twins[sequence]
        twin.cut(length)
        if self.random.integers(2):
            twin.ids = [*twin.ids[: max(twin.known, twin.computed)], 3]

    def remove(self):
        for sequence in self.pick(1, list(self.twins)):
            self.cache.remove(sequence)
            del self.twins[sequence]

    def swap(self):
        away = [sequence for sequence in self.twins if sequence.is_swapped]
        if away and self.random.integers(2):
            self.cache.try_swap_in(self.pick(2, away))
        else:
            self.cache.try_swap_out(self.pick(2), self.space)

    def tidy(self):
        ids, namespace = self.prompt()
        kind = self.random.integers(4)
        if kind == 0:
            self.cache.evict_prefix(ids, keep=3, namespace=namespace)
        elif kind == 1:
            self.cache.evict_namespace(namespace)
        elif kind == 2 and self.pins:
            self.pins.pop(0).release()
        else:
            self.pins.append(self.cache.pin_prefix(ids, namespace=namespace))

    # Steps.

    def step(self):
        sequences = self.pick(3)
        counts = [self.count(self.twins[sequence]) for sequence in sequences]
        most = self.cache.max_tokens_per_sequence
        if any(self.twins[one].computed + n > most for one, n in zip(sequences, counts, strict=True)):
            return
        try:
            batch = self.cache.prepare(sequences, counts)
        except OutOfBlocks:
            return
        wrong = self.draw_wrong(batch, counts)
        numbers = [
            self.twins[one].following(n, wrong[1] if wrong and wrong[0] == i else None)
            for i, (one, n) in enumerate(zip(sequences, counts, strict=True))
        ]
        self.write(batch, sequences, numbers)
        if self.random.integers(2):
            learn(self.cache, self.twins, sequences, counts)
        self.cache.commit(batch)
        for sequence, new in zip(sequences, numbers, strict=True):
            self.twins[sequence].numbers += new
        if wrong:
            self.revoke(sequences[wrong[0]], self.twins[sequences[wrong[0]]].computed - counts[wrong[0]] + wrong[1])

    def count(self, twin):
        waiting = max(0, twin.known - twin.computed)
        return int(self.random.choice([waiting, waiting, 0, 1, 3, 8]))

    def draw_wrong(self, batch, counts):
        """Draw a sequence and its first wrong token, all of whose slots are written; None for a step without any."""
        at = int(self.random.integers(len(counts))) if counts else 0
        if not self.attending or self.random.random() > 0.2 or not counts or counts[at] == 0:
            return None
        rows = slice(sum(counts[:at]), sum(counts[: at + 1]))
        is_written = all((batch.group(layer).slot_mapping.numpy()[rows] >= 0).all() for layer in self.attending)
        return (at, int(self.random.integers(counts[at]))) if is_written else None

    def write(self, batch, sequences, numbers):
        for layer in self.attending:
            shape = 1, *self.cache.key(layer).shape[2:]
            rows = np.array([digest(number, layer) for new in numbers for number in new], np.float32)
            rows = np.tile(rows[:, None, None], shape)
            self.cache.write(layer, rows, -rows, batch)
        for i, (sequence, new) in enumerate(zip(sequences, numbers, strict=True)):
            if self.rules is not None and new:
                self.write_states(batch, i, self.twins[sequence], new)

    def write_states(self, batch, index, twin, new):
        read, write, kept, length = (
            int(slots.numpy()[index])
            for slots in (batch.state_read, batch.state_write, batch.checkpoint_write, batch.checkpoint_lengths)
        )
        for plane in self.states():
            assert (plane[read] == (twin.numbers[-1] if twin.numbers else 0)).all()
            if kept:
                plane[kept] = new[length - twin.computed - 1]
            plane[write] = new[-1]

    def states(self):
        return [
            self.cache.plane("temporal", layer).numpy()
            for layer, spec in enumerate(self.layers)
            if isinstance(spec, StateSpec)
        ]

    def learn_late(self):
        sequences = self.pick(3, list(self.twins))
        learn(self.cache, self.twins, sequences, [0] * len(sequences))

    def revoke(self, sequence, first):
        """Revoke what a sequence has computed from token `first` on, and compute some of it again."""
        twin, size = self.twins[sequence], self.cache.block_size
        learn(self.cache, self.twins, [sequence], [0])
        if twin.computed // size > first // size:
            options = {"namespace": twin.namespace, "spans": twin.spans}
            affected = self.cache.revoke_prefix(twin.planned(twin.computed), valid=first, **options)
        else:
            block = int(self.cache.block_table(0).numpy()[sequence.row, first // size])
            affected = self.cache.revoke_blocks([block]) if block else {}
        if sequence not in affected:  # the block has left the window
            self.cache.remove(sequence)
            del self.twins[sequence]
            return
        self.num_revoked += 1
        for one, valid in affected.items() if self.random.integers(2) else ():
            if not one.is_swapped:
                self.cut(one, valid)

    # Contents of the cache.

    def check(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.num_computed_tokens == twin.computed
            assert sequence.tokens.tolist() == twin.ids[: twin.known]
            for layer in () if sequence.is_swapped else self.attending:
                self.check_slots(sequence, twin, layer)
            slot = 0 if self.rules is None or sequence.is_swapped else self.cache.state_slot(sequence)
            assert not slot or all((plane[slot] == twin.numbers[-1]).all() for plane in self.states())

    def check_slots(self, sequence, twin, layer):
        spec, group, size = self.layers[layer], self.cache.group_of(layer), self.cache.block_size
        held, seen = self.cache.held_from(sequence, group), 0
        if spec.window is not None:
            seen = max(0, twin.computed - spec.window + 1)
        elif spec.chunk is not None:
            seen = twin.computed // spec.chunk * spec.chunk
        assert held <= seen or twin.computed == 0
        at = np.array([*range(min(spec.sink_tokens, held, twin.computed)), *range(held, twin.computed)], np.int64)
        blocks = self.cache.block_table(group).numpy()[sequence.row].astype(np.int64)[at // size]
        expected = np.array([digest(twin.numbers[i], layer) for i in at], np.float32)[:, None, None]
        assert (self.cache.key(layer).numpy()[blocks, at % size] == expected).all()
        assert (self.cache.value(layer).numpy()[blocks, at % size] == -expected).all()
