"""Plain-Python model of the scheduler: requests are admitted one by one, and every list is recomputed in each step."""

import math
from dataclasses import replace

from pagecore.errors import PagecoreError
from pagecore.serving.scheduling import parts
from tests.serving.fake_cache import FakeCache


class FifoCache(FakeCache):
    """A fake cache that evicts in order of publication, so that looking up a prefix changes nothing."""

    def _hold(self, sequence, key):
        sequence.hold.append(key)
        self.holds[key] += 1
        self.used.setdefault(key, self.time)

    def _release(self, sequence):
        for key in sequence.hold:
            self.holds[key] -= 1
        sequence.hold = []

    def _publish(self, sequence):
        self.time += 1
        super()._publish(sequence)
        self.used = {key: time for key, time in self.used.items() if key in self.tree}

    def is_shared(self, sequence):
        """Return True if another sequence holds a block of a sequence, or pins one that the tree has."""
        others = [one for one in self.sequences.values() if one is not sequence and not one.is_swapped]
        blocks = {block for one in others for block in one.blocks}
        return not blocks.isdisjoint(sequence.blocks) or any(self.holds[key] > 1 for key in sequence.hold)


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
        self.matched = self.matched_at = -1
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


class SchedulerModel:
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
        self.must_accept = False
        self.steps = self.preemptions = self.swaps = self.prompt_steps = 0
        self.batch = cache.make_batch(self.max_running, self.budget)
        self.drafts, self.decode_counts = {}, {}
        self.drafted = [0, 0, 0]

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

    # -- the choice of a step --------------------------------------------------------------------------------------

    def schedule(self, drafts=None):
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
        if not rows:
            return None
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

    def smaller(self, running, rows, needs):
        """Return the rows that give way to `next_row`, by priority; none if all of them free too little."""
        if self.threshold is None or self.next_row is None:
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

    def sequences(self, rows):
        return [row.sequence for row in rows]

    def select(self, is_ahead):
        rows = [row for row in self.running if not row.is_prompt]
        if is_ahead:
            rows = [row for row in rows if row.sequence.num_computed_tokens + 1 < row.last]
        counts = [1] * len(rows)
        left = self.budget - len(rows)
        for place, row in enumerate(rows):
            room = row.last - 2 - row.sequence.num_computed_tokens
            count = max(min(self.drafts.get(row.name, 0), room, left), 0)
            counts[place] += count
            left -= count
        self.decode_counts = dict(zip(rows, counts, strict=True))
        budget, self.encoded = min(left, self.prefill), {}
        for row in self.running:
            if row.is_prompt and budget > 0:
                count = self.part(row, budget)
                if not count:
                    return rows, counts, 0
                rows.append(row)
                counts.append(count)
                self.encode(row, count)
                budget -= count
        return rows, counts, budget

    def part(self, row, budget):
        """Return the tokens of a prompt that a step computes, which end where the prompt keeps a checkpoint."""
        count = self.before_span(row, min(row.left, budget, self.chunk))
        if not self.checkpoints or count <= self.cache.grid:
            return count
        computed, grid, near = row.sequence.num_computed_tokens, self.cache.grid, parts.NEAREST
        ends = [row.sequence.num_matched_tokens // grid * grid]
        for k in range(self.checkpoints):
            end = (len(row.tokens) - near * 4**k) // grid * grid
            ends += [end] if end - row.sequence.num_cached_tokens >= near else []
        end = min(computed + count, *(end for end in ends if end > computed), len(row.tokens))
        if end < len(row.tokens) and end // grid * grid > computed:
            end = end // grid * grid
        return end - computed

    def missing_outputs(self, row, count):
        """Return the spans that the next tokens of a prompt are in and whose outputs are nowhere."""
        computed, length = row.sequence.num_computed_tokens, len(row.request.prompt)
        return [
            (first, last, digest)
            for first, last, digest in row.request.spans or ()
            if computed < min(last, length) and first < min(computed + count, length) and row.is_prompt
            if digest not in self.outputs
        ]

    def before_span(self, row, count):
        """Return `count`, or the tokens before the first span whose output no longer fits the step."""
        coming = {digest: last - first for digest, (_, first, last) in self.encoded.items()}
        for first, last, digest in self.missing_outputs(row, count):
            coming[digest] = max(last - first, coming.get(digest, 0))
            if sum(coming.values()) > self.encoder:
                return max(first - row.sequence.num_computed_tokens, 0)
        return count

    def encode(self, row, count):
        """Note the longest span of each digest whose output a part of a prompt needs."""
        for first, last, digest in self.missing_outputs(row, count):
            _, start, end = self.encoded.get(digest, (row, 0, 0))
            if last - first > end - start:
                self.encoded[digest] = row, first, last

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

    def free_rows(self):
        return self.max_running - sum(row.samples for row in self.running) - self.arriving

    def free_states(self):
        return self.state_rows - sum(row.samples for row in self.running) - self.arriving

    def drop_pinned(self, stopped):
        if self.pinned and self.pinned is not stopped and self.pinned.samples > self.free_rows():
            self.unpin(self.pinned)

    def pin(self, row):
        if row.sequence is not None:
            if row is not self.pinned or self.match(row) <= row.sequence.num_cached_tokens:
                return
            self.unpin(row)
        options = {"max_tokens": row.request.max_reused_tokens, "spans": row.request.spans}
        row.sequence = self.cache.add_sequence(row.tokens, id=row, **options)
        self.pinned = row

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
        needs = [*needs, row.left]
        rows = [*rows, row]
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

    def expected(self, row):
        future = 0 if self.ratio is None else self.future(row)
        return math.ceil(max(row.sequence.num_tokens + future, row.sequence.capacity) / self.cache.block_size)

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
        self.running.remove(row)
        self.waiting.insert(0, row)
        if self.ratio is not None:
            generated = sum(one.generated for one in self.running) + 20 * len(self.running)
            total = sum(one.request.max_new_tokens for one in self.running) + 1
            self.ratio = min(1.0, generated / total)

    def list_outputs(self, step, row, count):
        if row.is_prompt and row.sequence.num_computed_tokens + count < len(row.tokens):
            return
        if row.is_prompt and not row.request.max_new_tokens:
            step.unsampled.append(row)
            return
        if row.samples > 1 and not row.siblings:
            row.siblings = [Row(row.request, sample, 1, row) for sample in range(1, row.samples)]
        step.outputs += [row, *(one for one in row.siblings if one.state == "waiting" and row.samples > 1)]

    # -- the end of a step -------------------------------------------------------------------------------------------

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

    # -- loads -------------------------------------------------------------------------------------------------------

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

    # -- turns -------------------------------------------------------------------------------------------------------

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

    def leave_queue(self, row):
        for part in (self.waiting, self.continuing, self.loaded):
            if row in part:
                part.remove(row)

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
