"""Ends of the steps of the model."""

from tests.serving.model.rows import Row


class ModelStepEnds:
    """Commit, accept and abandon."""

    def list_outputs(self, step, row, count):
        if row.is_prompt and row.sequence.num_computed_tokens + count < len(row.tokens):
            return
        if row.is_prompt and not row.request.max_new_tokens:
            step.unsampled.append(row)
            return
        if row.samples > 1 and not row.siblings:
            row.siblings = [Row(row.request, sample, 1, row) for sample in range(1, row.samples)]
        step.outputs += [row, *(one for one in row.siblings if one.state == "waiting" and row.samples > 1)]

    def commit(self, step, accepted=None):
        """Commit a step; `accepted` is the number of tokens that each output gains."""
        wanted = sum(row.parent is not None and row.sequence is None and row.state == "waiting" for row in step.outputs)
        for row in [one for one in (*self.victims(), self.pinned) if one and one not in step.rows]:
            if self.used_rows + wanted > self.cache.max_sequences and wanted:
                (self.unpin if row is self.pinned else self.reclaim)(row)
        if accepted is None:
            self.cache.commit(self.batch)
        else:
            self.cache.commit(self.batch, accepted[: step.num_decodes] + step.counts[step.num_decodes :])
        for row in step.rows[step.num_decodes :]:
            row.is_prompt = row.sequence is not None and row.sequence.num_computed_tokens < len(row.tokens)
        for row in step.outputs:
            if row.parent and row.sequence is None and row.state == "waiting":
                row.sequence = self.cache.fork(row.parent.sequence, id=row)
                row.is_prompt, row.state = False, "running"
                self.running.insert(self.running.index(row.parent) + row.parent.forked, row)
                row.parent.forked += 1
            elif row.state == "running" and row.samples > 1:
                row.samples, row.forked = 1, 1
                row.siblings = []
        self.prompt_steps += step.num_decodes < len(step.rows)
        self.news += step.num_decodes < len(step.rows) or self.policy == "lpm"
        step.is_committed, step.gained = True, accepted or []

    def accept(self, step, ids, flags):
        for row, most, count in zip(step.rows[: step.num_decodes], step.counts, step.gained, strict=False):
            if row.sequence is not None and most > 1:
                self.drafted = [a + b for a, b in zip(self.drafted, (1, most - 1, count - 1), strict=True)]
        finished = []
        for row, gained, flag in zip(step.outputs, ids, flags, strict=True):
            if row.sequence is None:
                continue
            for place, token in enumerate(gained):
                num_generated = row.sequence.num_tokens + 1 - len(row.request.prompt)
                may_stop = not row.request.ignore_eos and num_generated >= row.request.min_new_tokens
                ends = (flag and place == len(gained) - 1) or (may_stop and token in row.request.stop_token_ids)
                if ends or row.sequence.num_tokens + 1 == row.last:
                    finished.append((row, [*row.sequence.ids, token]))
                    break
                row.sequence.ids.append(token)
        finished += [(row, list(row.sequence.ids)) for row in step.unsampled if row.state == "running"]
        for row, tokens in finished:
            row.tokens = tokens
            self.running.remove(row)
            if row.request.resumable:
                row.state, row.kept, row.sequence = "idle", row.sequence, None
                self.idle.append(row)
                self.learn(row)
                continue
            row.state = "finished"
            self.cache.remove(row.sequence)
            row.sequence = None
        for row in step.rows:
            if row in self.idle:
                self.learn(row)
        self.news += bool(finished)
        self.open.remove(step)
        if self.must_accept:
            self.return_to_prompts(self.running)
        self.must_accept = False
        return [row.name for row, _ in finished]

    def abandon(self, step):
        self.cache.abandon(self.batch)
        self.open.remove(step)
        self.must_accept = bool(self.open)
        self.undo_delays()
        if not self.open:
            self.return_to_prompts(step.rows)

    def return_to_prompts(self, rows):
        """Let rows compute again what an abandoned step has taken of their states."""
        for row in rows:
            if row.sequence is not None and row.sequence.num_computed_tokens + 1 < row.sequence.num_tokens:
                row.tokens, row.is_prompt = (row.tokens if row.is_prompt else list(row.sequence.ids)), True

    def undo_delays(self):
        for row, shared_at in self.delays:
            row.shared_at = shared_at
