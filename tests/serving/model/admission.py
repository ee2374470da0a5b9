"""Admissions of the model, one request after the other."""

import math


class ModelAdmission:
    """Requests that join a step, if rows and blocks suffice."""

    def admit(self, rows, counts, budget):
        if budget <= 0 or self.free_rows() <= 0:
            has_tokens = budget > 0 or sum(self.decode_counts.values()) == self.budget
            self.next_row = self.order()[0] if has_tokens and self.threshold is not None else None
            self.drop_pinned(None)
            return None
        needs = [row.left if row.is_prompt else 1 for row in rows]
        order, stopped, skipped = self.order(), None, 0
        if self.pinned is not order[0]:
            self.unpin(self.pinned)
        for row in order:
            lacks_states = self.running and row.samples > self.free_states()
            if budget <= 0 or row.samples > self.free_rows() or lacks_states or skipped == self.max_running:
                self.next_row = None if budget <= 0 or skipped == self.max_running else row
                break
            if self.holds and (self.left_to(row) > 1 or self.last_needs_output(row)):
                break
            self.make_rows(row)
            self.pin(row)
            if self.should_wait(row, rows, counts):
                self.delays.append((row, row.shared_at))
                row.shared_at = row.sequence.num_computed_tokens
                self.unpin(row)
                skipped += 1
                continue
            if not self.part(row, budget):
                if not row.sequence.is_swapped:
                    self.unpin(row)
                break
            if not self.fits(rows, needs, row):
                stopped = self.next_row = row
                break
            needs.append(row.left)
            row.came_late = self.is_late(row)
            if row.sequence.is_swapped:
                self.cache.swap_in([row.sequence])
            rows.append(row)
            counts.append(self.part(row, budget))
            self.encode(row, counts[-1])
            budget -= counts[-1]
            self.leave_queue(row)
            self.running.append(row)
            row.state, row.is_new, self.pinned = "running", False, None
        self.drop_pinned(stopped)
        return needs

    def left_to(self, row):
        """Return the tokens that a row of the queue would compute."""
        if row.sequence is not None and (row is not self.pinned or row.pinned_at == self.news):
            return row.left
        return min(row.left, len(row.tokens) - self.match(row))

    def free_rows(self):
        return self.max_running - sum(row.samples for row in self.running) - self.arriving

    def free_states(self):
        return self.state_rows - sum(row.samples for row in self.running) - self.arriving

    def drop_pinned(self, stopped):
        if self.pinned and self.pinned is not stopped and self.pinned.samples > self.free_rows():
            self.unpin(self.pinned)

    def pin(self, row):
        if row.sequence is not None:
            if row is not self.pinned or row.pinned_at == self.news:
                return
            if self.match(row) <= row.sequence.num_cached_tokens:
                row.pinned_at = self.news
                return
            self.unpin(row)
        options = {"max_tokens": row.request.max_reused_tokens, "spans": row.request.spans}
        row.sequence = self.cache.add_sequence(row.tokens, id=row, **options)
        self.pinned, row.pinned_at = row, self.news

    def unpin(self, row):
        if row is not None and row is self.pinned:
            self.cache.remove(row.sequence)
            row.sequence = self.pinned = None

    def should_wait(self, row, rows, counts):
        """Return True if a prompt of the step computes the block after the cached prefix of `row`."""
        cached, size = row.sequence.num_computed_tokens, self.cache.block_size
        end = (cached // size + 1) * size
        most = row.request.max_reused_tokens
        if not self.share or row is not self.pinned or end >= len(row.tokens) or cached <= row.shared_at:
            return False
        if most is not None and most < end:
            return False
        for other, count in zip(rows, counts, strict=True):
            computed = other.sequence.num_computed_tokens
            is_next = other.is_prompt and (computed // size + 1) * size == end <= computed + count
            is_alike = other.request.spans == row.request.spans
            if is_next and is_alike and other.tokens[:end] == row.tokens[:end]:
                return True
        return False

    def fits(self, rows, needs, row):
        """Return True once there is room for a row; rows between two turns give way if all of them may suffice."""
        reclaimed, may_share = self.reclaimed, self.share_blocks(self.victims([row]))
        while missing := self.missing(rows, needs, row):
            lacked = self.lacked(*self.demand(rows, needs, row))
            if self.running and not self.suffice(self.held_by(self.victims([row]), row), lacked):
                break
            if not self.reclaim_next(keep=[row]):
                break
        assert not missing or not self.running or self.reclaimed == reclaimed or may_share, "a run gave way for nothing"
        return not missing

    def missing(self, rows, needs, row):
        return max(self.lacked(*self.demand(rows, needs, row)))

    def demand(self, rows, needs, row):
        needs = [*(one.left for one in self.held), *needs, row.left]
        rows = [*self.held, *rows, row]
        if self.ratio is not None and len(self.running) > 0:
            needs = [
                min(need + self.future(one), self.max_length - one.sequence.num_computed_tokens)
                for one, need in zip(rows, needs, strict=True)
            ]
        needs = [max(need, self.decode_counts.get(one, 0)) for one, need in zip(rows, needs, strict=True)]
        return self.sequences(rows), needs

    def lacked(self, sequences, needs):
        """Return the blocks that a step lacks in each group, state slots last."""
        return self.cache.shortages(sequences, needs)

    def future(self, row):
        ratio = 1.0 if row.request.ignore_eos else self.ratio
        tokens = max(math.ceil(ratio * row.request.max_new_tokens - row.generated), 0)
        # The blocks of each sample but the first, token by token: those of the whole prompt are shared.
        size, end = self.cache.block_size, len(row.tokens) + tokens
        own = {place // size for place in range(len(row.tokens) // size * size, end)} if tokens else ()
        return tokens + (row.samples - 1) * len(own) * size

    def expected(self, row):
        future = 0 if self.ratio is None else self.future(row)
        return math.ceil(max(row.sequence.num_tokens + future, row.sequence.capacity) / self.cache.block_size)
