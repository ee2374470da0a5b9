"""Turns and ends of the runs of the model."""

from dataclasses import replace

from pagecore.errors import PagecoreError


class ModelTurns:
    """Runs that continue or end."""

    def resume(self, row, request, kept):
        """Queue an idle row for another turn, whose prompt begins with `kept` tokens of the row."""
        held = row.kept
        if held is not None and max(held.num_tokens, held.num_computed_tokens) > kept:
            try:
                self.cache.truncate([held], [kept])
            except PagecoreError:
                self.cache.remove(held)
                held = None
        if held is not None:
            for token in request.prompt[held.num_tokens :].tolist():
                held.ids.append(token)
        self.idle.remove(row)
        row.sequence, row.kept, row.state, row.is_prompt = held, None, "waiting", True
        row.request, row.tokens = request, request.prompt.tolist()
        row.shared_at, row.matched_at, row.goes_first = -1, -1, False
        row.since, row.arrival = self.steps, self.added
        self.added += 1
        self.waiting.append(row)
        self.continuing.append(row)

    def finish(self, row):
        if row not in self.idle:
            for one in (row, *row.siblings):
                one.request = replace(one.request, resumable=False)
            return False
        self.cancel(row)
        row.state = "finished"
        return True

    def extend(self, row, request):
        self.unpin(row)
        if row.sequence is not None:
            for token in request.prompt[row.sequence.num_tokens :].tolist():
                row.sequence.ids.append(token)
        for one in (row, *row.siblings):
            one.request, one.tokens = request, request.prompt.tolist()
        row.is_prompt, row.shared_at, row.matched_at = True, -1, -1

    def cancel(self, row):
        if row.state in ("finished", "cancelled"):
            return False
        self.news += 1
        if row.sequence is not None:
            row.tokens = list(row.sequence.ids)
            self.cache.remove(row.sequence)
        elif row in self.loading:
            self.loading.pop(row).cancel()
        elif row in self.idle:
            if row.kept is not None:
                self.cache.remove(row.kept)
            row.kept = None
        elif row.parent and row not in self.waiting:
            row.parent.samples -= 1
        for one in (row, *(row.siblings if row.samples > 1 else [])):
            one.state = "cancelled"
        row.sequence, row.siblings = None, []
        self.pinned = None if self.pinned is row else self.pinned
        for part in (self.running, self.idle):
            if row in part:
                part.remove(row)
        self.leave_queue(row)
        return True
