"""Idle runs of the model, and what they hold."""

import math


class ModelIdle:
    """Runs between two turns."""

    @property
    def parked(self):
        return [row for row in self.idle if row.kept is not None and not row.kept.is_swapped]

    def learn(self, row):
        """Let the sequence of an idle row know the tokens that it has computed."""
        if row.kept is not None and not row.kept.is_swapped:
            for token in row.tokens[row.kept.num_tokens : row.kept.num_computed_tokens]:
                row.kept.ids.append(token)

    def victims(self, keep=()):
        """Return the rows between two turns that hold blocks, in the order in which they give them up."""
        order = list(self.waiting)
        if self.policy == "priority":
            order.sort(key=lambda row: (-row.request.priority, row.arrival, row.sample))
        held = [row for row in order if row in self.continuing and row.sequence and not row.sequence.is_swapped]
        return self.parked + [row for row in held[::-1] if row not in keep and row is not self.pinned]

    def held_by(self, rows, coming=None):
        """Return the most blocks, and state slots, that rows between two turns free for a row that is coming."""
        size, swaps = self.cache.block_size, coming is not None and coming.sequence.is_swapped
        held = [(row, row.kept if row in self.idle else row.sequence) for row in rows]
        blocks = sum(math.ceil(one.capacity / size) + (row.request.samples > 1) for row, one in held)
        return [blocks, sum(self.cache.slots_of(one, swaps) for _, one in held)] if self.cache.num_states else [blocks]

    def suffice(self, held, lacked):
        return all(one >= other for one, other in zip(held, lacked, strict=True))

    def share_blocks(self, rows):
        """Return True if others hold blocks or slots of rows between two turns, too."""
        held = [row.kept if row in self.idle else row.sequence for row in rows]
        return any(row.request.samples > 1 for row in rows) or any(map(self.cache.is_shared, held))

    def reclaim_next(self, keep=()):
        victims = self.victims(keep)
        if victims:
            self.reclaim(victims[0])
        return bool(victims)

    def make_rows(self, row):
        wanted = self.max_running - self.free_rows() + row.samples
        while wanted + len(self.victims([row])) > self.cache.max_sequences and self.victims([row]):
            self.reclaim_next([row])

    def reclaim(self, row, swap=True):
        held = row.kept if row in self.idle else row.sequence
        fits = held.num_computed_tokens <= held.num_tokens
        if not (swap and fits and self.space and self.cache.try_swap_out([held], self.space)):
            self.cache.remove(held)
            held = None
        if row in self.idle:
            row.kept = held
        else:
            row.sequence = held
        self.reclaimed += 1
        self.news += 1

    def make_swap_room(self, sequence):
        size = self.cache.block_size
        most = sum(
            math.ceil(row.kept.num_computed_tokens / size) for row in self.idle if row.kept and row.kept.is_swapped
        )
        if self.space.num_available + most < math.ceil(sequence.num_computed_tokens / size):
            return
        for row in self.idle:
            if self.space.num_available >= math.ceil(sequence.num_computed_tokens / size):
                return
            if row.kept is not None and row.kept.is_swapped:
                self.cache.remove(row.kept)
                row.kept = None
