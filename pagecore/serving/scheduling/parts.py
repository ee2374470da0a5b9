"""Parts of a prompt: how many of its tokens a step computes.

With recurrent states, a prefix can be reused only up to a checkpoint, and a step keeps one. A prompt that no other has
shared yet does not show where later ones will leave it, but most do so near its end: they repeat a system prompt, a
document or a chat, and differ in what follows. Parts therefore also end 512, 2,048, 8,192, ... tokens before the end of
a prompt, so that a prompt that leaves it q tokens before its end computes at most about 3 q tokens again (512 for a
small q), with a number of checkpoints that is logarithmic in the length.

    cached, without a state                                   -8192            -2048   -512
    |---------------------- branch |----------------------------|----------------|-------|---|
                            the prompt leaves the others here: they need a state before it

A part that ends because the step is full ends on the grid of the checkpoints, too: at the last point that it reaches. A
part that reaches none computes what it can, and the next one ends at a point. The state at the end of a part is a
checkpoint there. After a part that ended elsewhere, the last part but one ends at the last point of the prompt, because
a step keeps the states after whole chunks that follow its first token, and none of these would be at the end of a
block:

    |-------- grid --------|-------- grid --------|------ end of the prompt
    |--- 50 ---|--- 14 ----|--- 50 ---|--- 14 ----|--- 40

Tokens of an image may attend to one another in both directions, which takes all of them in one step. With `whole_spans`
no part ends inside a span: it ends before the span, or waits for a step with room for all of it. The rows of a step
with trees of drafts are short; where a span is longer, a step without drafts computes it. With `whole_prompts` all of a
prompt is such a span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagecore.errors import UnsupportedOption
from pagecore.serving.scheduling.encoding import UNLIMITED
from pagecore.storage import StateSpec
from pagecore.storage.checks import flag, require_int, shown

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, Sequence
    from pagecore.cache.prefix.retention import Spans
    from pagecore.serving.scheduling.encoding import EncoderLoad
    from pagecore.serving.scheduling.request import Run

__all__ = ["DEFAULT_CHECKPOINTS", "PromptParts", "choose_parts", "longest_span"]

DEFAULT_CHECKPOINTS = 4
# Tokens between the end of a prompt and the last checkpoint before it, and bits of the factor to the next distance. A
# checkpoint is also worth a step only if it is that far after the state that the prompt begins with.
NEAREST = 512
FACTOR_BITS = 2


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Rule of the parts of prompts.

    Attributes
    ----------
    chunk : int
        Tokens of a part at most.
    grid : int
        Tokens between the lengths at which a state can be kept.
    checkpoints : int
        Checkpoints before the end of a prompt, those of branches not counted; 0 for parts that end anywhere.
    whole_spans : bool
        True if no part ends inside a span.
    whole_prompts : bool
        True if a prompt has one part, after what it reuses.
    tree_tokens : int
        Tokens of a part at most in a step with trees of drafts; 0 in other steps.
    short : int
        Tokens of a step at most that keeps the state at its end alone.
    unmatched : int
        Tokens at the end of a prompt that an equal prompt never reuses.
    """

    chunk: int
    grid: int = 1
    checkpoints: int = 0
    whole_spans: bool = False
    whole_prompts: bool = False
    tree_tokens: int = 0
    short: int = 1
    unmatched: int = 1

    @property
    def chooses_ends(self) -> bool:
        """True if parts may end before the tokens that a step has left for them."""
        return self.whole_spans or self.whole_prompts or self.checkpoints > 0

    def count(self, run: Run, budget: int, load: EncoderLoad = UNLIMITED) -> int:
        """Return the tokens of the next part of a prompt whose run has a sequence, at most `budget`.

        0 if the part would end inside a span for which there is no room, or begins with one whose encoder output does
        not fit the load.
        """
        most = min(run.num_tokens_left, budget, self.chunk)
        if self.tree_tokens:
            most = min(most, self.tree_tokens)
        if load.is_limited:
            most = load.fit(run, most)
        count = self._up_to_checkpoint(run, most) if self.checkpoints else most
        if not (self.whole_spans or self.whole_prompts):
            return count
        spans, length = self._whole(run)
        if not spans:
            return count
        computed = run.sequence.num_computed_tokens
        end = _end_outside(spans, computed, computed + count, length)
        return end - computed if end <= computed + most else 0

    def trees_delay(self, run: Run, budget: int, load: EncoderLoad) -> bool:
        """Return True if a prompt without a part in a step with trees would have one in a step without them."""
        return self.tree_tokens > 0 and replace(self, tree_tokens=0).count(run, budget, load) > 0

    def cut(self, runs: list[Run], budgets: list[int]) -> list[int]:
        """Return the tokens of the next parts of prompts with a budget each, in order; none passes another.

        The first prompt has all of a span that is longer than its budget. Prompts after one without tokens have none.
        """
        counts = [0] * len(runs)
        for i, (run, budget) in enumerate(zip(runs, budgets, strict=True)):
            counts[i] = self.count(run, budget if i else max(budget, self._span_left(run)))
            if not counts[i]:
                break
        return counts

    def _span_left(self, run: Run) -> int:
        """Return the tokens of the next part if it begins with a span that it must compute as a whole; else 0."""
        computed = run.sequence.num_computed_tokens
        spans, length = self._whole(run)
        left = _end_outside(spans, computed, computed + 1, length) - computed
        return left if left > 1 else 0

    def _whole(self, run: Run) -> tuple[Spans, int]:
        """Return the spans inside which no part ends, and the length of the prompt that has them."""
        if self.whole_prompts:
            return ((0, len(run.tokens), b""),), len(run.tokens)
        return (run.request.spans if self.whole_spans and run.request.spans else ()), len(run.request.prompt)

    def _up_to_checkpoint(self, run: Run, most: int) -> int:
        """Return the tokens of a part of at most `most` that ends at a checkpoint, or before the first it could reach.

        The part that passes the last one keeps it without a step of its own, unless it begins elsewhere or is short.
        """
        sequence, length = run.sequence, len(run.tokens)
        computed = sequence.num_computed_tokens
        end = min(computed + most, self._next_checkpoint(sequence, length))
        last = (length - self.unmatched) // self.grid * self.grid
        if computed < last < end and (computed % self.grid or end - computed <= self.short):
            on_grid = last
        else:
            on_grid = 0 if end == length else end // self.grid * self.grid
        return (on_grid if on_grid > computed else end) - computed

    def _next_checkpoint(self, sequence: Sequence, length: int) -> int:
        """Return where the next checkpoint of a prompt is; its length if it has none before its end."""
        computed = sequence.num_computed_tokens
        branch = sequence.num_matched_tokens // self.grid * self.grid
        if branch <= computed:
            branch = length
        for k in range(self.checkpoints - 1, -1, -1):
            end = (length - (NEAREST << FACTOR_BITS * k)) // self.grid * self.grid
            if end > computed and end - sequence.num_cached_tokens >= NEAREST:
                return min(branch, end)
        return branch


def _end_outside(spans: Spans, computed: int, end: int, length: int) -> int:
    """Return the last end up to `end` that is after `computed` and inside no span, or the first one after `end`."""
    for first, last, _ in spans:
        if first < end < min(last, length):
            return first if first > computed else min(last, length)
    return end


def longest_span(spans: Spans, length: int) -> int:
    """Return the most tokens that a span has in a prompt of `length` tokens."""
    return max((min(last, length) - first for first, last, _ in spans if first < length), default=0)


def choose_parts(
    cache: PagedKVCache,
    chunk: int,
    prompt_checkpoints: int | None,
    whole_spans: bool = False,
    whole_prompts: bool = False,
) -> PromptParts:
    """Check the options of prompts and return the rule for a cache; the errors are those of `Scheduler`."""
    whole_spans, whole_prompts = flag("whole_spans", whole_spans), flag("whole_prompts", whole_prompts)
    if not cache.num_states:
        if prompt_checkpoints is not None:
            raise UnsupportedOption(
                f"prompt_checkpoints is {shown(prompt_checkpoints)}, but the cache has no states; leave it out"
            )
        return PromptParts(chunk, whole_spans=whole_spans, whole_prompts=whole_prompts)
    if prompt_checkpoints and whole_prompts:
        raise UnsupportedOption(
            f"prompt_checkpoints is {shown(prompt_checkpoints)} with whole_prompts; one step keeps one checkpoint: "
            "leave prompt_checkpoints out, or compute prompts in parts"
        )
    if prompt_checkpoints is None:
        wanted = DEFAULT_CHECKPOINTS if getattr(cache, "has_prefix_cache", True) and not whole_prompts else 0
    else:
        wanted = require_int("prompt_checkpoints", prompt_checkpoints, 0, 16)
    specs = (cache.spec(layer) for layer in range(cache.num_layers))
    rules = next(spec for spec in specs if isinstance(spec, StateSpec))
    return PromptParts(
        chunk,
        rules.prefill_grid(cache.block_size),
        wanted,
        whole_spans,
        whole_prompts,
        short=1 + rules.draft_tokens,
        unmatched=1 + cache.block_size * cache.recompute_last_block,
    )
