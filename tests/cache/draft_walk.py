"""Random steps with rejected drafts, and a model of ids and lengths in plain Python."""

import numpy as np

from pagecore.errors import OutOfBlocks
from tests.cache.caches import make


class Twin:
    """Model of a sequence: its ids and lengths."""

    def __init__(self, tokens, computed):
        self.tokens = list(tokens)
        self.computed = computed

    def commit(self, count, accepted):
        self.computed += accepted
        if accepted < count:
            self.tokens = self.tokens[: max(0, min(len(self.tokens), self.computed))]


def key_at(text, position):
    """Return a number for a token and all tokens before it, which float32 represents exactly."""
    number = 0
    for token in text[: position + 1]:
        number = (number * 31 + token + 1) % 1_000_003
    return float(number)


class Walk:
    """A cache whose keys are the numbers of their prefixes, and a model of each sequence."""

    def __init__(self, layers, seed):
        self.random = np.random.default_rng(seed)
        self.cache = make(layers, num_blocks=40, max_sequences=5, max_tokens_per_sequence=60)
        self.twins = {}
        self.texts = [[]]

    def pick(self):
        sequences = list(self.twins)
        count = self.random.integers(1, len(sequences) + 1)
        return [sequences[i] for i in self.random.permutation(len(sequences))[:count]]

    def new_ids(self, count):
        return self.random.integers(0, 2, count).tolist()  # few ids, so that sequences share prefixes

    def add(self):
        if len(self.twins) == 5:
            return
        old = self.texts[self.random.integers(len(self.texts))]
        tokens = [*old[: self.random.integers(0, len(old) + 1)], *self.new_ids(self.random.integers(0, 6))][:40]
        sequence = self.cache.add_sequence(tokens)
        assert sequence.num_cached_tokens <= max(0, len(tokens) - 1)
        self.twins[sequence] = Twin(tokens, sequence.num_cached_tokens)

    def fork(self):
        if 0 < len(self.twins) < 5:
            (parent,) = self.pick()[:1]
            twin = self.twins[parent]
            self.twins[self.cache.fork(parent)] = Twin(twin.tokens, twin.computed)

    def remove(self, sequence=None):
        if sequence is None and self.twins:
            sequence = self.pick()[0]
        if sequence is not None:
            self.cache.remove(sequence)
            self.texts.append(self.twins.pop(sequence).tokens)

    def append(self):
        for sequence in self.pick() if self.twins else ():
            twin = self.twins[sequence]
            ids = self.new_ids(self.random.integers(0, 4))
            if len(twin.tokens) + len(ids) <= 50:
                self.cache.append_tokens([sequence], [ids])
                twin.tokens += ids

    def step(self):
        """Run a step of known and unknown ids and reject some; sometimes abandon it, or remove a sequence."""
        sequences = [each for each in (self.pick() if self.twins else ()) if self.twins[each].computed < 50]
        counts = [int(self.random.integers(0, 6)) for _ in sequences]
        try:
            batch = self.cache.prepare(sequences, counts)
        except OutOfBlocks:
            return self.remove()
        ids = self.step_ids(batch, sequences, counts)
        going = self.random.integers(8)
        if going == 0:
            return self.cache.abandon(batch)
        self.write(batch, sequences, counts, ids)
        if going == 1 and sequences:
            self.remove(sequences[0])
        accepted = [int(self.random.integers(0, count + 1)) for count in counts]
        starts = [self.twins[each].computed if each in self.twins else 0 for each in sequences]
        is_late = self.random.integers(2)
        if not is_late:
            self.learn(sequences, ids, starts, counts)
        if sum(accepted) == sum(counts) and self.random.integers(2):
            self.cache.commit(batch)
        elif len(set(accepted)) == 1:
            self.cache.commit(batch, accepted=accepted[0])
        else:
            self.cache.commit(batch, accepted=accepted)
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            if sequence in self.twins:
                self.twins[sequence].commit(count, kept)
        if is_late:
            self.learn(sequences, ids, starts, accepted)
        return None

    def step_ids(self, batch, sequences, counts):
        """Check batch.token_ids; return the ids of each sequence in the step, with random ids for unknown ones."""
        shown = np.split(np.asarray(batch.token_ids)[: batch.num_tokens], np.cumsum(counts)[:-1])
        ids = []
        for sequence, count, some in zip(sequences, counts, shown, strict=bool(sequences)):
            twin = self.twins[sequence]
            known = twin.tokens[twin.computed : twin.computed + count]
            assert some.tolist() == known + [-1] * (count - len(known))
            ids.append([*known, *self.new_ids(count - len(known))])
        return ids

    def learn(self, sequences, ids, starts, counts):
        """Append those of the first `counts` ids of the step that the cache does not know."""
        for sequence, some, start, count in zip(sequences, ids, starts, counts, strict=True):
            if sequence in self.twins:
                twin = self.twins[sequence]
                late = some[max(0, len(twin.tokens) - start) : count]
                self.cache.append_tokens([sequence], [late])
                twin.tokens += late

    def write(self, batch, sequences, counts, ids):
        keys = []
        for sequence, count, some in zip(sequences, counts, ids, strict=True):
            twin = self.twins[sequence]
            text = [*twin.tokens[: twin.computed], *some]
            keys += [key_at(text, twin.computed + k) for k in range(count)]
        tokens = np.tile(np.array(keys, np.float32)[:, None, None], (1, 2, 8))
        for layer in range(self.cache.num_layers):
            self.cache.write(layer, tokens, tokens, batch)

    def check(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.tokens
            assert sequence.num_computed_tokens == twin.computed
            for layer in range(self.cache.num_layers):
                self.check_keys(layer, sequence, twin)

    def check_keys(self, layer, sequence, twin):
        """Assert that every position that the next token sees holds the key of its own prefix."""
        table = self.cache.block_table(self.cache.group_of(layer)).numpy()[sequence.row]
        window = self.cache.spec(layer).window or 10**6
        keys = self.cache.key(layer).numpy()
        for position in range(max(0, twin.computed - window + 1), min(twin.computed, len(twin.tokens))):
            assert keys[table[position // 4], position % 4, 0, 0] == key_at(twin.tokens, position)
