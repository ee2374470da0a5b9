"""The queue of the model, and its order."""

from tests.serving.model.rows import Row


class ModelQueue:
    """Runs that wait."""

    def displaced_by(self, request, max_queued):
        """Return None if there is room for a request, else the row that leaves for it, or "full"."""
        fresh = [row for row in self.waiting if row.is_new]
        if max_queued is None or len(fresh) < max_queued:
            return None
        lower = [row for row in fresh if row.request.priority < request.priority and not self.is_late(row)]
        if self.policy != "priority" or not lower:
            return "full"
        least = min(row.request.priority for row in lower)
        return [row for row in lower if row.request.priority == least][-1]

    def add(self, request):
        row = Row(request, 0, request.samples if request.max_new_tokens else 1)
        row.since, row.arrival = self.steps, self.added
        self.added += 1
        self.waiting.append(row)
        return row

    def order(self):
        late = [row for row in self.ready if self.is_late(row)]
        fresh = [row for row in self.ready if row not in late]
        if self.policy == "priority":
            return late + sorted(fresh, key=lambda row: (-row.request.priority, row.arrival, row.sample))
        if self.policy == "lpm":
            for row in self.ready:
                if row.matched_at != self.prompt_steps:
                    has_own = row in self.continuing and row.sequence is not None
                    row.matched = row.sequence.num_computed_tokens if has_own else self.match(row)
                    row.matched_at = self.prompt_steps
            return late + sorted(fresh, key=lambda row: (not row.goes_first, -row.matched))
        return self.ready

    def is_late(self, row):
        return self.steps - row.since >= self.max_wait

    def match(self, row):
        return self.cache.match_length(row.tokens, max_tokens=row.request.max_reused_tokens, spans=row.request.spans)

    def leave_queue(self, row):
        for part in (self.waiting, self.continuing, self.loaded):
            if row in part:
                part.remove(row)
