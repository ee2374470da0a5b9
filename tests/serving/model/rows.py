"""Runs and steps of the model."""


class Row:
    """A run of the model."""

    def __init__(self, request, sample, samples, parent=None):
        self.request, self.sample, self.samples, self.parent = request, sample, samples, parent
        self.name = request.id, sample
        self.tokens = request.prompt.tolist()
        self.sequence, self.siblings = None, []
        self.is_prompt, self.state = True, "waiting"
        self.preemptions, self.since, self.shared_at = 0, 0, -1
        self.goes_first, self.kept, self.arrival = False, None, 0 if parent is None else parent.arrival
        self.matched = self.matched_at = self.pinned_at = -1
        self.is_new = parent is None
        self.came_late = parent is not None and parent.came_late

    @property
    def left(self):
        return len(self.tokens) - (self.sequence.num_computed_tokens if self.sequence else 0)

    @property
    def generated(self):
        known = len(self.tokens) if self.sequence is None else self.sequence.num_tokens
        return known - len(self.request.prompt)

    @property
    def last(self):
        return len(self.request.prompt) + self.request.max_new_tokens


class ModelStep:
    def __init__(self, rows, counts, num_decodes):
        self.rows, self.counts, self.num_decodes = rows, counts, num_decodes
        self.outputs, self.unsampled, self.is_committed = [], [], False
        self.encoder_spans = []
