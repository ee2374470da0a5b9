"""Runs that give way in the model."""

import math


class ModelPreemption:
    """Running runs that go back to the queue."""

    def smaller(self, running, rows, needs):
        """Return the rows that give way to `next_row`, by priority; none if all of them free too little."""
        if self.threshold is None or self.next_row is None or self.holds:
            return []
        row, victims = self.next_row, []
        most = row.request.priority - self.threshold
        newest_first = [one for one in running if not one.came_late and one.request.priority < most][::-1]
        if not newest_first:
            return []
        lacking = row.samples - self.free_rows()
        if self.running:
            lacking = max(lacking, row.samples - self.free_states())
        if lacking > sum(one.samples for one in newest_first):
            return []
        size, wanted = self.cache.block_size, None
        if row.sequence is None or needs is None:
            future = 0 if self.ratio is None else self.future(row)
            wanted = math.ceil(min(len(row.tokens) + future, self.max_length) / size)
            wanted += sum(self.expected(one) - one.sequence.capacity // size for one in self.running)
        most = sum(self.expected(one) + (one.request.samples > 1) for one in newest_first)
        while True:
            missing = self.missing(rows, needs, row) if wanted is None else wanted - self.cache.num_available
            idle = self.victims([row])
            if missing <= 0 or not idle:
                break
            if wanted is not None and missing > most + self.held_by(idle)[0]:
                break
            lacked = self.lacked(*self.demand(rows, needs, row)) if wanted is None else []
            if lacked and not self.suffice([most + held for held in self.held_by(idle, row)], lacked):
                break
            self.reclaim(idle[0])
        for other in sorted(newest_first, key=lambda one: one.request.priority):
            if max(lacking, missing) <= 0:
                break
            lacking -= other.samples
            missing -= self.expected(other) + (other.request.samples > 1)
            victims.append(other)
        return victims if max(lacking, missing) <= 0 else []

    def preempt(self, missing):
        victims = self.running[::-1]
        if self.ratio is not None:
            victims.sort(key=lambda row: (row.generated, -len(row.request.prompt)))
        if self.policy == "priority":
            victims.sort(key=lambda row: (row.came_late, row.request.priority))
        freed = 0
        for row in victims[:-1]:
            freed += self.freed(row)
            self.give_way(row)
            if freed >= missing:
                return

    def freed(self, row):
        slots = max(row.sequence.num_tokens, row.sequence.capacity)
        return math.ceil(slots / self.cache.block_size) + (row.request.samples > 1)

    def send_back(self, rows, swap):
        for row in [one for one in self.victims() if one in rows]:
            self.reclaim(row, swap)
        for row in self.idle:
            if row in rows and row.kept is not None and not swap:
                self.cache.remove(row.kept)
                row.kept = None
        if self.pinned in rows:
            self.unpin(self.pinned)
        for row in self.waiting:
            if row.sequence is not None and not swap and row in rows:
                self.cache.remove(row.sequence)
                row.sequence = None
        running, ratio = [row for row in self.running if row in rows], self.ratio
        for row in running[::-1]:
            self.give_way(row, swap)
        self.ratio = ratio
        return [row.name for row in running]

    def give_way(self, row, swap=True):
        row.tokens = list(row.sequence.ids)
        if swap and self.space:
            self.make_swap_room(row.sequence)
        if swap and self.space and self.cache.try_swap_out([row.sequence], self.space):
            self.swaps += 1
        else:
            self.cache.remove(row.sequence)
            row.sequence = None
        row.is_prompt, row.state, row.since = True, "waiting", self.steps
        row.preemptions, row.matched_at, row.goes_first = row.preemptions + 1, -1, True
        self.preemptions += 1
        self.news += 1
        self.running.remove(row)
        self.waiting.insert(0, row)
        if self.ratio is not None:
            generated = sum(one.generated for one in self.running) + 20 * len(self.running)
            total = sum(one.request.max_new_tokens for one in self.running) + 1
            self.ratio = min(1.0, generated / total)
