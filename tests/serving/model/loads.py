"""Runs of the model that wait for loads."""


class ModelLoads:
    """Loads, and the room that imports take."""

    @property
    def ready(self):
        return [row for row in self.waiting if row not in self.loading]

    @property
    def arriving(self):
        """Number of rows that hold a row of the cache for an import."""
        return sum(row in self.cache.sequences for row in self.loading)

    def end_loads(self):
        for row, load in list(self.loading.items()):
            if load.has_ended:
                self.arrive(row)

    def may_load(self, row):
        """Return True if a row may begin to wait for a load: it is in the queue, without a sequence and a load."""
        has_own = row.sequence is not None and row is not self.pinned
        return row in self.waiting and not has_own and row not in self.loading and row not in self.loaded

    def wait_for(self, row, load):
        self.unpin(row)
        self.loading[row] = load

    def make_import_room(self, row, count):
        """Return True if there are a row and blocks for `count` tokens of a row of the queue; idle rows give way."""
        self.unpin(self.pinned)
        in_flight = self.open[-1].rows if self.open and not self.open[-1].is_committed else []
        victims = [one for one in self.victims() if one not in in_flight]
        if row.samples > self.free_rows():
            return False
        if self.used_rows == self.cache.max_sequences and victims:
            self.reclaim(victims.pop(0))
        if self.used_rows == self.cache.max_sequences:
            return False
        self.pin(row)
        needs = [row.sequence], [max(count - row.sequence.num_computed_tokens, 1)]
        reclaimed, may_share = self.reclaimed, self.share_blocks(victims)
        while any(lacked := self.lacked(*needs)) and self.suffice(self.held_by(victims, row), lacked):
            self.reclaim(victims.pop(0))
        assert not any(lacked) or self.reclaimed == reclaimed or may_share, "a run gave way for nothing"
        self.unpin(row)
        return not any(lacked)

    @property
    def used_rows(self):
        return sum(not sequence.is_swapped for sequence in self.cache.sequences.values())

    def arrive(self, row):
        load = self.loading.pop(row)
        self.loaded.append(row)
        self.news += 1
        is_other = load.namespace != row.request.namespace or (load.spans or ()) != (row.request.spans or ())
        held, length = self.cache.sequences.get(row), len(row.tokens)
        row.matched_at = -1
        if held is None:
            return
        if is_other or held.ids != row.tokens[: held.num_tokens]:
            self.cache.remove(held)
            return
        if max(held.num_tokens, held.num_computed_tokens) >= length:
            self.cache.truncate([held], [length - 1])
        held.ids.extend(row.tokens[held.num_tokens :])
        row.sequence = held
        if row not in self.continuing:
            self.continuing.append(row)
