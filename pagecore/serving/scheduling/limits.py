"""Limits of a scheduler, checked against its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagecore.cache.memory.demand import PROMPT_TOKENS
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.scheduling.encoding import all_outputs, check_outputs, longest_output
from pagecore.serving.scheduling.future import future_ratios
from pagecore.serving.scheduling.parts import PromptParts, choose_parts, longest_span
from pagecore.serving.scheduling.request import RequestError
from pagecore.storage import StateSpec
from pagecore.storage.checks import INT32_MAX, as_float, flag, require_int, shown

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, SwapSpace
    from pagecore.serving.scheduling.encoding import Outputs
    from pagecore.serving.scheduling.future import Ratios
    from pagecore.serving.scheduling.request import Request

__all__ = ["POLICIES", "Limits", "check_order", "choose_limits"]

# Orders of the queue.
POLICIES = ("fcfs", "lpm", "priority")

# Methods of a cache that the scheduler calls.
CACHE_CALLS = ("add_sequence", "fork", "remove", "shortage", "try_prepare", "commit", "abandon", "append_tokens")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a scheduler.

    Attributes
    ----------
    max_running : int
        Sequences that run at once; at most the rows of the cache, and at most `max_tokens_per_step`.
    max_tokens_per_step : int
        Tokens of one step, as the caller chose it.
    budget : int
        Tokens of one step that the cache can hold; at most `max_tokens_per_step`.
    prompt_tokens : int
        Tokens of a prompt for which an admission wants room in the blocks of every window; at most `budget`.
    max_length : int
        Slots of the longest sequence that the cache can hold alone.
    headroom : int
        Slots that an admission leaves free while other runs are running.
    state_rows : int
        Sequences up to which an admission goes while other runs are running, so that each of them, samples that are
        not forked yet included, has its state slots; `max_running` for a cache without states.
    prefill_tokens : int
        Prompt tokens of one step.
    parts : PromptParts
        Tokens of one prompt in one step.
    encoder_tokens : int or None
        Tokens of the encoder outputs that one step may compute; None for any number.
    embeddings : container of (bytes or int)
        Digests of the encoder outputs that are kept from earlier steps.
    span_tokens : int
        Tokens of the longest span that a step can compute as a whole.
    policy : str
        Order of the queue, one of `POLICIES`.
    max_wait_steps : int
        Steps in the queue after which a run goes before those that have waited less.
    shares_prompts : bool
        True if a request waits one step for blocks that another one computes in this step.
    preemption_threshold : int or None
        Difference of priorities beyond which a waiting run preempts a running one; None if it never does.
    max_drafts : int
        Drafts of a run in one step for which a cache with states has slots; without states, more than any step has.
    max_queued : int or None
        Requests that wait for their first admission; None for any number.
    tree_tokens : int
        Tokens of a row of a step with trees; 0 if the batch has no room for trees.
    ratios : Ratios or None
        Course of the ratio of future tokens; None if admissions do not count them.
    holds_prompts : bool
        True for a step that computes decodes, and of prompts only last tokens, without outputs of encoders.
    """

    max_running: int
    max_tokens_per_step: int
    budget: int
    prompt_tokens: int
    max_length: int
    headroom: int
    state_rows: int
    prefill_tokens: int
    parts: PromptParts
    encoder_tokens: int | None
    embeddings: Outputs
    span_tokens: int
    policy: str
    max_wait_steps: int
    shares_prompts: bool
    preemption_threshold: int | None
    max_drafts: int
    max_queued: int | None
    tree_tokens: int
    ratios: Ratios | None
    holds_prompts: bool = False

    def check_request(self, id: object, num_prompt_tokens: int, max_new_tokens: int, samples: int = 1) -> None:
        """Raise `RequestError` for a request that the cache cannot hold alone; see `Scheduler.check_request`."""
        num_prompt_tokens = require_int("num_prompt_tokens", num_prompt_tokens, max=None)
        max_new_tokens = require_int("max_new_tokens", max_new_tokens, 0, max=None)
        self.check_size(id, num_prompt_tokens, max_new_tokens, require_int("samples", samples, max=None))

    def check_size(self, id: object, num_prompt_tokens: int, max_new_tokens: int, samples: int) -> None:
        """Raise `RequestError` as `check_request`, for the numbers of a `Request`, which has checked them."""
        # The last generated token is never computed.
        num_slots = num_prompt_tokens + max(max_new_tokens - 1, 0)
        if num_slots > self.max_length:
            raise RequestError(
                f"request {id} needs {num_slots} slots ({num_prompt_tokens} tokens of prompt, "
                f"{max_new_tokens} to generate); the cache holds {self.max_length} for one sequence; "
                "give it more blocks or longer rows, or shorten the request"
            )
        if samples > self.max_running:
            raise RequestError(
                f"request {id} has {samples} samples; at most {self.max_running} sequences run at once; "
                "raise max_running (and max_tokens_per_step, and max_sequences of the cache), or use fewer samples"
            )

    def check_encoder(self, request: Request) -> None:
        """Raise `RequestError` for encoder outputs that no step may compute.

        The first step of a request computes what cross attention reads, and may begin with the longest output.
        """
        if self.encoder_tokens is None:
            return
        count = all_outputs if self.parts.whole_prompts else longest_output
        needed = count(request.spans or (), len(request.prompt)) + (request.cross_tokens or 0)
        if needed > self.encoder_tokens:
            raise RequestError(
                f"request {request.id} needs {needed} encoder tokens in one step; a step may compute "
                f"{self.encoder_tokens}: raise max_encoder_tokens, or split the image or the audio"
            )

    def check_spans(self, request: Request) -> None:
        """Raise `RequestError` for a span or a prompt that no step can compute as a whole, if steps must."""
        if self.parts.whole_prompts and request.num_slots > self.span_tokens:
            raise RequestError(
                f"request {request.id} has up to {request.num_slots} tokens to compute in one step if it is preempted; "
                f"a step computes {self.span_tokens} tokens of a prompt: raise max_tokens_per_step, max_prefill_tokens "
                "and chunked_prefill_size, or the blocks of windows, or shorten the request"
            )
        if not self.parts.whole_spans or request.spans is None:
            return
        longest = longest_span(request.spans, len(request.prompt))
        if longest > self.span_tokens:
            raise RequestError(
                f"request {request.id} has a span of {longest} tokens, which one step must compute; a step computes "
                f"{self.span_tokens} tokens of a prompt: raise max_tokens_per_step, max_prefill_tokens and "
                "chunked_prefill_size, or the blocks of windows, or split the span"
            )


def choose_limits(
    cache: PagedKVCache,
    *,
    max_running: int,
    max_tokens_per_step: int,
    headroom: float,
    swap_space: SwapSpace | None,
    states_per_run: int | None,
    policy: str,
    max_wait_steps: int,
    max_prefill_tokens: int | None,
    chunked_prefill_size: int | None,
    prompt_checkpoints: int | None,
    whole_spans: bool,
    whole_prompts: bool,
    max_encoder_tokens: int | None,
    embeddings: Outputs,
    share_prompts: bool,
    new_token_ratio: float | None,
    conservativeness: float,
    preemption_threshold: int | None,
    max_queued: int | None,
    max_tree_tokens: int,
) -> Limits:
    """Check the arguments of a scheduler and return its limits; the errors are those of `Scheduler`."""
    if not all(callable(getattr(cache, name, None)) for name in CACHE_CALLS):
        raise UnsupportedOption(f"expected a PagedKVCache as cache, got {shown(cache)}")
    max_running = require_int("max_running", max_running)
    max_tokens_per_step = require_int("max_tokens_per_step", max_tokens_per_step)
    headroom = as_float("headroom", headroom)
    if not 0 <= headroom <= 1:
        raise ShapeError(f"headroom is {headroom}; expected a share of the pool between 0 and 1")
    if swap_space is not None and getattr(swap_space, "cache", None) is not cache:
        raise UnsupportedOption(
            f"swap_space {shown(swap_space)} does not belong to this cache; make it with SwapSpace(cache)"
        )
    max_running = min(max_running, max_tokens_per_step, cache.max_sequences)
    rules = _state_rules(cache)
    state_rows = _state_rows(cache, rules, states_per_run, max_running)
    # The pools are empty: a single sequence may use all of their slots.
    max_length = cache.max_length
    num_slots = cache.num_available * cache.block_size
    # Each token of a step has its own slot, so a step with more tokens than slots could never be prepared.
    budget = min(max_tokens_per_step, max(num_slots, max_running))
    prefill_tokens = _at_most("max_prefill_tokens", max_prefill_tokens, budget)
    chunk = _at_most("chunked_prefill_size", chunked_prefill_size, budget)
    parts = choose_parts(cache, chunk, prompt_checkpoints, whole_spans, whole_prompts)
    return Limits(
        max_running=max_running,
        max_tokens_per_step=max_tokens_per_step,
        budget=budget,
        prompt_tokens=min(budget, cache.max_step_tokens, PROMPT_TOKENS),
        max_length=max_length,
        headroom=int(max(max_length, num_slots) * headroom),
        state_rows=state_rows,
        prefill_tokens=prefill_tokens,
        parts=parts,
        encoder_tokens=None if max_encoder_tokens is None else require_int("max_encoder_tokens", max_encoder_tokens),
        embeddings=check_outputs(embeddings),
        span_tokens=min(prefill_tokens, parts.chunk, cache.max_step_tokens),
        policy=check_order(policy),
        max_wait_steps=require_int("max_wait_steps", max_wait_steps),
        shares_prompts=flag("share_prompts", share_prompts) and getattr(cache, "has_prefix_cache", True),
        preemption_threshold=_threshold(preemption_threshold, policy),
        max_drafts=INT32_MAX if rules is None else rules.draft_tokens,
        max_queued=None if max_queued is None else require_int("max_queued", max_queued, max=None),
        tree_tokens=require_int("max_tree_tokens", max_tree_tokens, 0),
        ratios=future_ratios(new_token_ratio, conservativeness),
    )


def _threshold(threshold: int | None, policy: str) -> int | None:
    if threshold is None:
        return None
    if policy != "priority":
        raise UnsupportedOption(f"preemption_threshold is given with the policy {shown(policy)}; it needs 'priority'")
    return require_int("preemption_threshold", threshold, 0)


def _at_most(name: str, value: int | None, most: int) -> int:
    return most if value is None else min(require_int(name, value), most)


def check_order(policy: str) -> str:
    """Return `policy`; raise UnsupportedOption unless it is one of `POLICIES`."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnsupportedOption(f"policy is {shown(policy)}; expected one of {', '.join(POLICIES)}")
    return policy


def _state_rules(cache: PagedKVCache) -> StateSpec | None:
    """Return a spec of the layers that keep states, which all have the same rules; None if there are none."""
    if not cache.num_states:
        return None
    specs = (cache.spec(layer) for layer in range(cache.num_layers))
    return next(spec for spec in specs if isinstance(spec, StateSpec))


def _state_rows(cache: PagedKVCache, rules: StateSpec | None, states_per_run: int | None, max_running: int) -> int:
    """Return the number of sequences for which the cache has `states_per_run` slots each; at least 1."""
    if rules is None:
        if states_per_run is not None:
            raise UnsupportedOption(
                f"states_per_run is {shown(states_per_run)}, but the cache has no states; leave it out"
            )
        return max_running
    least = (1 if rules.in_place else 2) + rules.draft_tokens
    wanted = least if states_per_run is None else require_int("states_per_run", states_per_run, least)
    return max((cache.num_states - 1) // wanted, 1)
