"""The plain model of a random walk: numbers of tokens, sequences, and layers of any kinds."""

import zlib

from pagecore import AttentionSpec, Plane, StateSpec

PLANE = Plane("temporal", (2,), "float32", per="sequence")


def digest(*what):
    """Return a number that float32 represents exactly."""
    return 1 + zlib.crc32(repr(what).encode()) % (1 << 22)


class Twin:
    """Model of one sequence: known and future ids, and the number of each computed token."""

    def __init__(self, namespace, span, ids):
        self.namespace, self.span, self.ids = namespace, span, list(ids)
        self.known, self.numbers = len(ids), []

    @property
    def computed(self):
        return len(self.numbers)

    @property
    def spans(self):
        return None if self.span is None else [self.span]

    def copy(self):
        twin = Twin(self.namespace, self.span, self.ids)
        twin.known, twin.numbers = self.known, list(self.numbers)
        return twin

    def cut(self, length):
        self.ids, self.known, self.numbers = self.ids[:length], min(self.known, length), self.numbers[:length]

    def planned(self, length):
        """Return the first ids; later ones follow from those before."""
        while len(self.ids) < length:
            self.ids.append(zlib.crc32(repr(self.ids[-9:]).encode()) % 2)
        return self.ids[:length]

    def following(self, count, wrong_from=None):
        """Return the numbers of the next tokens."""
        number = self.numbers[-1] if self.numbers else digest(self.namespace)
        found = []
        for at, token in enumerate(self.planned(self.computed + count)[self.computed :]):
            position = self.computed + at
            media = self.span[2] if self.span and self.span[0] <= position < self.span[1] else None
            number = digest(number, token, media, wrong_from is not None and at >= wrong_from)
            found.append(number)
        return found


def draw_layers(random):
    """Return layers of any kinds, and the spec of those that keep states or None."""
    layers, rules = [], None
    has_states = random.random() < 0.4
    for _ in range(random.integers(0 if has_states else 1, 4)):
        width = int(random.integers(1, 14))
        limits = [
            {},
            {},
            {"window": width},
            {"window": width, "sink_tokens": int(random.integers(1, 9))},
            {"chunk": width},
        ]
        limits = limits[random.integers(len(limits))]
        limits |= {"lookahead": int(random.integers(min(3, width) + 1))} if limits else {}
        layers.append(AttentionSpec(2, 4, dtype="float32", num_query_heads=4, **limits))
    if has_states:
        chunk, steps = random.integers(1, 6), random.integers(1, 4)
        rules = {"chunk": int(chunk), "interval": int(chunk * steps), "in_place": bool(random.integers(2))}
        layers.insert(random.integers(len(layers) + 1), StateSpec((PLANE,), **rules, split=None))
    return layers, rules
