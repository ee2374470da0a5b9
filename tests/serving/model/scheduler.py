"""Plain-Python model of the scheduler: requests are admitted one by one, and every list is recomputed in each step."""

import math

from tests.serving.model.admission import ModelAdmission
from tests.serving.model.idle import ModelIdle
from tests.serving.model.loads import ModelLoads
from tests.serving.model.preemption import ModelPreemption
from tests.serving.model.prompts import ModelPrompts
from tests.serving.model.queue import ModelQueue
from tests.serving.model.rows import ModelStep
from tests.serving.model.step_ends import ModelStepEnds
from tests.serving.model.turns import ModelTurns


class SchedulerModel(
    ModelQueue, ModelPrompts, ModelAdmission, ModelPreemption, ModelStepEnds, ModelLoads, ModelIdle, ModelTurns
):
    """A scheduler whose decisions are those of `Scheduler`."""

    def __init__(
        self, cache, *, space, max_running, max_tokens, overlap, policy, max_wait, prefill, chunk, share, ratio,
        threshold=None, states_per_run=None, checkpoints=0, encoder=None, outputs=(),
    ):  # fmt: skip
        self.cache, self.space, self.overlap, self.policy = cache, space, overlap, policy
        self.max_running = min(max_running, max_tokens, cache.max_sequences)
        self.state_rows = self.max_running
        if cache.num_states:
            self.state_rows = max((cache.num_states - 1) // (states_per_run or cache.least_states), 1)
        self.max_length = cache.max_length
        self.budget = min(max_tokens, max(cache.num_available * cache.block_size, self.max_running))
        self.max_wait, self.share, self.threshold = max_wait, share, threshold
        self.prefill, self.chunk, self.checkpoints = prefill or self.budget, chunk or self.budget, checkpoints
        self.encoder, self.outputs, self.encoded = encoder or math.inf, outputs, {}
        self.first_ratio = self.ratio = ratio
        self.running, self.waiting, self.open, self.delays = [], [], [], []
        self.pinned = None
        # Runs between two turns: their sequences, if they have one, are in `Row.kept` while they are idle.
        self.idle, self.continuing = [], []
        self.reclaimed = self.added = 0
        self.loading, self.loaded = {}, []
        self.must_accept = self.holds = False
        # Changes after which a longer prefix of the next row is looked for; decodes count under "lpm" alone.
        self.news = 0
        self.held = []
        self.steps = self.preemptions = self.swaps = self.prompt_steps = 0
        self.batch = cache.make_batch(self.max_running, self.budget)
        self.drafts, self.decode_counts = {}, {}
        self.drafted = [0, 0, 0]

    def schedule(self, drafts=None, hold=False):
        """Return the next step; `drafts` is a number of drafts for each name of a run, or None."""
        self.drafts = drafts or {}
        is_ahead = bool(self.open)
        if is_ahead and self.must_accept:
            return None
        self.end_loads()
        if not (self.running or self.ready):
            self.ratio = self.first_ratio
            return None
        before = self.preemptions
        self.holds = hold and bool(self.decodes(is_ahead))
        chosen = self.prepared(is_ahead)
        if self.holds and chosen == ([], []) and not is_ahead:  # the last decode gave way
            self.holds = False
            chosen = self.prepared(is_ahead)
        if chosen is None or not chosen[0]:
            return None
        rows, counts = chosen
        step = ModelStep(rows, counts, sum(not row.is_prompt for row in rows))
        self.encoded = {}
        for row, count in zip(rows, counts, strict=True):
            self.list_outputs(step, row, count)
            self.encode(row, count)
        step.encoder_spans = [(rows.index(row), *span, digest) for digest, (row, *span) in self.encoded.items()]
        if self.ratio is not None and before == self.preemptions:
            least = self.first_ratio * 0.14
            self.ratio = max(self.ratio - (self.first_ratio - least) / 600, least)
        self.steps += 1
        self.open.append(step)
        return step

    def prepared(self, is_ahead):
        """Return the rows of a prepared step and their counts; None for a step that has to wait."""
        rows, counts = self.choose(is_ahead)
        while rows and self.cache.try_prepare(self.sequences(rows), counts, self.batch) is None:
            if self.parked:
                self.reclaim(self.parked[0])
            elif self.pinned:
                self.unpin(self.pinned)
            elif self.return_spare_blocks() or self.cut_drafts(rows, counts) or self.reclaim_next():
                continue
            elif is_ahead or (self.arriving and len(self.running) == 1):
                self.undo_delays()
                return None
            else:
                self.preempt(self.cache.shortage(self.sequences(rows), counts))
                rows, counts, _ = self.select(is_ahead)
        return rows, counts

    def decodes(self, is_ahead):
        rows = [row for row in self.running if not row.is_prompt]
        return [row for row in rows if not is_ahead or row.sequence.num_computed_tokens + 1 < row.last]

    def return_spare_blocks(self):
        size, held = self.cache.block_size, self.sequences(self.running)
        spare = [one for one in held if one.capacity > math.ceil((one.num_computed_tokens + 1) / size) * size]
        if not self.drafted[0] or not spare:
            return False
        self.cache.truncate(spare, [max(one.num_tokens, one.num_computed_tokens) for one in spare])
        return True

    def cut_drafts(self, rows, counts):
        """Cut the drafts of a step to the most a row that fit, one by one; return False if it has none."""
        num_decodes = sum(not row.is_prompt for row in rows)
        most = max(counts[:num_decodes], default=1) - 1
        if not most:
            return False
        while most:
            most -= 1
            counts[:num_decodes] = [min(count, 1 + most) for count in counts[:num_decodes]]
            if not self.cache.shortage(self.sequences(rows), counts):
                break
        return True

    def choose(self, is_ahead):
        running = list(self.running)
        while True:
            self.delays, self.next_row = [], None
            rows, counts, budget = self.select(is_ahead)
            if not self.ready:
                return rows, counts
            needs = self.admit(rows, counts, budget)
            victims = self.smaller(running, rows, needs)
            if not victims:
                return rows, counts
            self.undo_delays()
            if is_ahead:
                return [], []
            ratio = self.ratio
            for row in victims:
                self.give_way(row)
                running.remove(row)
            self.ratio = ratio

    def sequences(self, rows):
        return [row.sequence for row in rows]

    def select(self, is_ahead):
        rows = self.decodes(is_ahead)
        counts = [1] * len(rows)
        left = self.budget - len(rows)
        for place, row in enumerate(rows):
            room = row.last - 2 - row.sequence.num_computed_tokens
            count = max(min(self.drafts.get(row.name, 0), room, left), 0)
            counts[place] += count
            left -= count
        self.decode_counts = dict(zip(rows, counts, strict=True))
        budget, self.encoded = min(left, self.prefill), {}
        self.held = [
            row
            for row in self.running
            if self.holds and row.is_prompt and (row.left > 1 or self.missing_outputs(row, 1))
        ]
        for row in self.running:
            if row.is_prompt and budget > 0 and row not in self.held:
                count = self.part(row, budget)
                if not count:
                    return rows, counts, 0
                rows.append(row)
                counts.append(count)
                self.encode(row, count)
                budget -= count
        return rows, counts, budget
