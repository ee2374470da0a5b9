"""An engine that proposes drafts: some are the tokens that the model would choose, the others are wrong."""

import numpy as np

from pagecore import PagedKVCache
from pagecore.serving import DraftTree
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, request
from tests.serving.served import Server, answer, hashed

WRONG = 5000
SPEC = AttentionSpec(1, 8)


def decoding(*lengths, new=20, cache=None, **options):
    """Return a scheduler whose requests have computed their prompts, and their runs."""
    scheduler = Scheduler(cache or FakeCache(64), **options)
    runs = [scheduler.add(request(number, length, new)) for number, length in enumerate(lengths)]
    while any(run.prefilling for run in runs):
        advance(scheduler)
    return scheduler, runs


def real(num_blocks=33, block_size=4, **options):
    return PagedKVCache(SPEC, num_blocks=num_blocks, block_size=block_size, device="none", **options)


class DraftServer(Server):
    """Serves requests with drafts; `propose(server, run)` returns what `schedule` takes for a run."""

    def __init__(self, *, propose, **options):
        super().__init__(**options)
        self.propose = propose
        self.drafted = {}

    def truth(self, run):
        """Return the tokens that the model generates after the last known token of a decoding run."""
        text = answer(run.request, run.sample)
        return text[run.held.num_computed_tokens + 1 :]

    def proposals(self):
        running = [run for run in self.scheduler.running if not run.prefilling]
        found = {run: self.propose(self, run) for run in running}
        return {run: drafts for run, drafts in found.items() if drafts is not None}

    def launch(self, step):
        """Compute a step; return the ids that each output gains, and the accepted path of each."""
        batch = step.batch
        ids = np.asarray(batch.token_ids)[: batch.num_tokens]
        starts = np.asarray(batch.host.cu_query_lens)
        assert (ids[step.unknown_positions] == -1).all()
        if len(step.unknown_positions):
            self.num_ahead += 1
            last = np.array([row[-1] for row in self.sampled[0]])
            ids[step.unknown_positions] = last[step.unknown_outputs]
        places = iter(step.draft_positions.tolist())
        for row, count in enumerate(step.num_drafts):
            for number in range(count):
                place = next(places)
                assert place == starts[row] + 1 + number
                if ids[place] < 0:  # the drafter writes its ids to the batch
                    ids[place] = self.drafted[step.runs[row]][number]
        assert next(places, None) is None
        assert (ids >= 0).all()
        slots = np.asarray(batch.host.slot_mappings[0])[: batch.num_tokens]
        self.plane[slots[slots >= 0]] = ids[slots >= 0]
        self.computed += sum(step.counts)
        self.runs |= {(run.request.id, run.sample): run for run in step.outputs}
        rows, paths = [], []
        for run, row in zip(step.outputs, step.output_rows, strict=True):
            source = step.runs[row]
            if source.held is None:
                rows.append([0])
                paths.append([0])
                continue
            context = self.context(batch, row).tolist()
            new = step.counts[row] if row < step.num_decodes else 1
            parents = None if step.parents is None else step.parents[row]
            gained, path = self.verify(context[: len(context) - new + 1], context[len(context) - new :], parents, run)
            rows.append(gained)
            paths.append(path)
        return rows, paths

    def verify(self, known, new, parents, run):
        """Return the tokens that a row gains, and the indices of its accepted tokens."""
        parents = np.arange(-1, len(new) - 1) if parents is None else parents
        text, path, gained = list(known), [0], []
        while True:
            gained.append(hashed(text, run.sample))
            text.append(gained[-1])
            children = [k for k in range(len(new)) if parents[k] == path[-1] and k and new[k] == gained[-1]]
            if not children:
                return gained, path
            path.append(children[0])

    def commit(self, step, found):
        rows, paths = found
        if step.parents is not None:
            self.scheduler.commit(step, accepted_path=paths)
        elif step.has_drafts:
            self.scheduler.commit(step, [len(row) for row in rows])
        else:
            self.scheduler.commit(step)

    def accept(self):
        step, (rows, _) = self.previous, self.sampled
        self.previous = self.sampled = None
        flags = None
        if self.ends is not None:
            flags, cut = [], []
            for run, row in zip(step.outputs, rows, strict=True):
                ends = [self.ends(run.request.id, token) for token in row]
                flags.append(any(ends))
                cut.append(row[: ends.index(True) + 1] if any(ends) else row)
            rows = cut
        for run in self.scheduler.accept(step, rows, flags if flags is None else np.array(flags, bool)):
            assert (run.request.id, run.sample) not in self.ended
            self.ended[run.request.id, run.sample] = run.tokens.tolist()

    def turn(self, between=lambda: None):
        ahead = self.scheduler.overlap
        proposals = self.proposals()
        step = self.scheduler.schedule(proposals or None)
        between()
        found = None if step is None else self.launch(step)
        between()
        if self.previous is not None:
            self.accept()
            between()
        elif step is None:
            return False
        if step is not None:
            self.commit(step, found)
            self.previous, self.sampled = step, found
            if not ahead:
                between()
                self.accept()
        return True


def some_right(choice, most, form="any"):
    """Return a `propose` of up to `most` drafts, of which the first ones are right; `form` says how they are given."""

    def propose(server, run):
        count = choice.randint(0, most)
        right = server.truth(run)[: choice.randint(0, count)]
        ids = right + [WRONG + choice.randint(0, 9) for _ in range(count - len(right))]
        kind = choice.choice(["ids", "count", "none"]) if form == "any" else form
        if kind == "none":
            return None
        server.drafted[run] = ids
        return len(ids) if kind == "count" else ids

    return propose


def some_trees(choice, most):
    """Return a `propose` of trees of up to `most` drafts, in which a path may be right."""

    def propose(server, run):
        count = choice.randint(0, most)
        if choice.random() < 0.2:
            return [WRONG] * min(count, 3)
        parents = [choice.randint(-1, number - 1) for number in range(count)]
        truth, ids, depths = server.truth(run), [], []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
            is_right = choice.random() < 0.6 and depths[-1] < len(truth)
            ids.append(truth[depths[-1]] if is_right else WRONG + choice.randint(0, 9))
        return DraftTree(parents, ids)

    return propose
