"""Continuous batching over a paged cache, without a model or a framework.

Each step gives one token to every decoding run, and more if the engine proposes drafts for it. The remaining budget
goes to prompts in chunks, in order of admission. Requests are then admitted from the queue, in the order of the policy,
while the pool can hold their whole prompts and, in a cache with states, their states. When blocks or state slots run
short, a run is preempted and moves to the front of the queue. If a swap space has room, the run is swapped out and
later continues where it was. Otherwise its blocks are freed and its tokens so far become its prompt (recomputation); a
prefix that is still cached when the run returns is not recomputed. Both ways are as in vLLM.

S1: runs are served in order of admission, which under "fcfs" is the order of arrival, except that a request waits for
    an equal prompt or a load while others pass; each turn of a resumable request arrives on its own. When blocks or
    state slots run short, idle runs give way first, and at least one run stays. A run gives way to an admission only
    if its priority is smaller and it did not come late. Every step computes at least one token, so there is no
    livelock.
S2: the rows reserved for the runs, samples that are not forked yet included, never exceed `max_running`.
S3: the swap space holds only sequences of waiting and idle runs; their computed tokens are not recomputed.
S4: with overlap, at most one committed step waits for its ids when the next one is scheduled; nothing is preempted by
    a step that is scheduled before these ids are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecore.cache.state._state import StateLock
from pagecore.serving.scheduling.crossing import batch_tokens
from pagecore.serving.scheduling.limits import choose_limits
from pagecore.serving.scheduling.roster import Roster
from pagecore.serving.scheduling.step_calls import SchedulerSteps
from pagecore.storage.checks import flag

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, SwapSpace
    from pagecore.serving.scheduling.encoding import Outputs

__all__ = ["Scheduler"]


class Scheduler(SchedulerSteps):
    """Continuous batching: `add`, then `schedule`, `commit`, `accept` until `schedule` returns None.

    `schedule` returns a step, the engine computes it, `commit` marks its tokens as computed, and `accept` takes the
    sampled ids. If the forward pass fails, call `abandon` instead of `commit` and `accept`; the next step computes the
    same tokens again. `add`, `cancel` and `finish` are allowed at any time.

    A run of a resumable request does not end with its generation: it is idle until `extend` continues it or `finish`
    ends it, and holds what it has computed until others need the room. `wait_for` lets a run of the queue wait for a
    load.

    Only one step is open at a time, unless `overlap` is True: then `schedule` may follow `commit` at once, and `accept`
    of the older step comes while the device computes the newer one. `Step.unknown_positions` and `Step.unknown_outputs`
    say where the sampled ids of the older step go in the batch of the newer one. A run that `accept` finds finished
    gives back its blocks at once; the extra token that the newer step computes for it is dropped. `schedule` returns
    None while the ids of an open step are needed first: accept it, and schedule again.

    An operation that raises has either not happened or happened completely, even if Ctrl-C interrupts it. The
    properties show which: `steps` are the open steps (their `state` shows if they are committed), and `waiting` lists
    the queue.

    Decisions depend on the calls and their arguments only, not on time or hashes: schedulers of several ranks that are
    made alike and get the same calls return the same steps. Their `embeddings` must hold the same digests.

    Every method and property may be used from any thread: a call waits until that of another thread has returned, and
    then has its turn. `figures` never waits, and counts such as `num_running` wait only for a change that is half
    done. The calls of one step, from `schedule` to `accept`, still have their order. In a child of `os.fork`, no call
    of another thread is under way.

    Parameters
    ----------
    cache : PagedKVCache
        An empty cache. From now on only the scheduler may add sequences to it, and imports for its runs (see
        `wait_for`); the id of each is its `Run`.
    max_running : int
        Maximum number of sequences that run at once, up to 2^31 - 1. It is capped at the rows of the cache and at
        `max_tokens_per_step`, so that each running sequence gets a token in each step.
    max_tokens_per_step : int
        Maximum number of tokens of one step, prompt and decode together, up to 2^31 - 1.
    headroom : float
        Share of the pool, 0 to 1, that an admission leaves free, so that the new run is not preempted a few steps
        later. It does not apply when nothing else runs.
    states_per_run : int, optional
        State slots that an admission leaves for each running sequence of a cache with states, samples that are not
        forked yet included; it does not apply when nothing else runs. By default those without which the sequence
        cannot run: 1, or 2 with ``in_place=False``, and its draft tokens. One or two more keep the checkpoints of
        prompts when slots are short; fewer sequences run then, and more prefixes are reused.
    swap_space : SwapSpace, optional
        A swap space of this cache for preempted runs. Without one, or while it is full, preempted runs are recomputed.
    overlap : bool
        If True, one step may be scheduled before the ids of the step before it are accepted.
    policy : str
        Order of admission: "fcfs", by arrival; "lpm", the longest cached prefix first, for the 128 oldest requests of
        the queue, whose prefixes are looked up again when a step has computed prompts; "priority", the largest
        `Request.priority` first. Under "priority" the smallest priority is preempted first.
    max_wait_steps : int
        Steps in the queue after which a run is late: late runs go before all others, in the order of the queue, and
        under "priority" a run that came late is not preempted for its priority. This bounds starvation under "lpm" and
        "priority".
    max_prefill_tokens : int, optional
        Maximum number of prompt tokens of one step, of all prompts together.
    chunked_prefill_size : int, optional
        Maximum number of tokens of one prompt in one step.
    prompt_checkpoints : int, optional
        Checkpoints, 0 to 16, that a prompt keeps before its end in a cache with states: parts of it end where others
        branched off, and 512, 2,048, 8,192, ... tokens before its end. A prompt that shares most of this one then
        begins near the end of what they share, even if it is the first to do so; each checkpoint costs one step of the
        prompt. 4 by default; 0 computes a prompt in as few steps as the other limits allow.
    whole_spans : bool
        If True, no step ends inside a span of a prompt, for models whose images attend in both directions. A part of
        the prompt ends before the span, or waits until decodes and drafts leave room for all of it; no other prompt
        passes it meanwhile. If only `max_tree_tokens` leaves too little room, the step has no drafts. A prefix that is
        reused may end inside a span.
    whole_prompts : bool
        If True, one step computes all of a prompt that is not reused: a prompt waits until decodes and drafts leave
        room for it, and no other prompt passes it. For models that cannot continue a prompt, and for logits of all of
        its tokens at once. A request that could outgrow a step before its last token, because a preempted one is
        computed again, is refused. As vLLM's ``enable_chunked_prefill=False``.
    max_encoder_tokens : int, optional
        Maximum number of tokens of the encoder outputs that one step makes necessary, such as the embeddings of images,
        or what cross attention reads. Outputs count whole, also if the step or the prompt has only a part of the span.
        A part of a prompt ends in front of the span whose output no longer fits. A prompt that begins with that span
        waits for a later step, and no other prompt passes it. By default any number.
    embeddings : container of (bytes or int)
        The encoder outputs that the engine keeps, asked by the digests of spans: an `EmbeddingCache`, or a set. An
        output that is kept, or that another row of the step needs, is not computed and does not count. What is kept
        when a step is scheduled must stay until the step has run. Empty by default: a step then computes the outputs of
        all spans of which it computes tokens.
    share_prompts : bool
        If True, a request waits one step for the blocks of its prompt that another request computes in this step, and
        then reuses them. Up to `max_running` requests wait in a step, and others pass them.
    new_token_ratio : float, optional
        If given, an admission leaves room for the tokens that the runs will generate: for each run this share, 0 to 1,
        of `max_new_tokens`, less what it has generated, and all of `max_new_tokens` with ``ignore_eos``. The share
        decays linearly to 0.14 of its start over 600 steps, and returns to its start when `schedule` finds nothing to
        run. When blocks run short nevertheless, the run with the fewest generated tokens is preempted, the longest
        prompt first, and the share becomes ``min(1, (generated + 20 * runs) / (sum of max_new_tokens + 1))`` of the
        remaining runs. As in SGLang, which starts at 0.7.
    conservativeness : float
        Factor of `new_token_ratio`; the product is at most 1.
    preemption_threshold : int, optional
        If given, under "priority", a request that lacks rows or blocks preempts running ones whose priority is smaller
        by more than this number, if that makes room for its whole prompt. By default no admission preempts.
    max_queued : int, optional
        Maximum number of requests that wait for their first admission; preempted runs do not count. `add` refuses more
        with `QueueFull`. Under "priority" a request takes the place of the waiting one with the smallest priority, the
        newest of equal ones, if its own is larger: that run is cancelled, and is `Run.displaced` of the new one. Late
        runs keep their places. By default any number.
    max_tree_tokens : int
        Largest number of tokens of a row in a step with trees of drafts, the token before them included; 0: no trees.
        In such a step a prompt brings at most this number of tokens, too.

    Attributes
    ----------
    cache : PagedKVCache
    swap_space : SwapSpace or None
    overlap : bool
    max_running, max_tokens_per_step : int
        Limits; `max_running` with the caps applied.
    max_length : int
        Slots of the longest sequence that the cache can hold when it holds nothing else.

    Raises
    ------
    ShapeError
        A limit is not an integer in its range, `headroom` or `new_token_ratio` is outside 0 to 1, or `conservativeness`
        is negative.
    UnsupportedOption
        `cache` is not a PagedKVCache, `swap_space` belongs to another cache, `states_per_run` or `prompt_checkpoints`
        is given for a cache without states, or `prompt_checkpoints` with `whole_prompts`; `preemption_threshold` is
        given for another policy, the policy is unknown, `embeddings` is not a container, or a flag is not True or
        False.
    NotEnoughMemory
        The arrays of a step of `max_tokens_per_step` tokens cannot be allocated.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_running: int = 256,
        max_tokens_per_step: int = 8192,
        headroom: float = 0.01,
        states_per_run: int | None = None,
        swap_space: SwapSpace | None = None,
        overlap: bool = False,
        policy: str = "fcfs",
        max_wait_steps: int = 1000,
        max_prefill_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        prompt_checkpoints: int | None = None,
        whole_spans: bool = False,
        whole_prompts: bool = False,
        max_encoder_tokens: int | None = None,
        embeddings: Outputs = (),
        share_prompts: bool = True,
        new_token_ratio: float | None = None,
        conservativeness: float = 1.0,
        preemption_threshold: int | None = None,
        max_queued: int | None = None,
        max_tree_tokens: int = 0,
    ) -> None:
        self._limits = limits = choose_limits(
            cache,
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            headroom=headroom,
            swap_space=swap_space,
            states_per_run=states_per_run,
            policy=policy,
            max_wait_steps=max_wait_steps,
            max_prefill_tokens=max_prefill_tokens,
            chunked_prefill_size=chunked_prefill_size,
            prompt_checkpoints=prompt_checkpoints,
            whole_spans=whole_spans,
            whole_prompts=whole_prompts,
            max_encoder_tokens=max_encoder_tokens,
            embeddings=embeddings,
            share_prompts=share_prompts,
            new_token_ratio=new_token_ratio,
            conservativeness=conservativeness,
            preemption_threshold=preemption_threshold,
            max_queued=max_queued,
            max_tree_tokens=max_tree_tokens,
        )
        self._stop_ids = set()
        self.overlap = flag("overlap", overlap)
        self.cache = cache
        self.swap_space = swap_space
        self.max_running = limits.max_running
        self.max_tokens_per_step = limits.max_tokens_per_step
        self.max_length = limits.max_length
        # On a device the next step overwrites the batch in the order of the stream, at addresses that graphs rely on.
        num_batches = 2 if overlap and getattr(cache, "device", "cpu") in ("cpu", "none") else 1
        cross = [tokens for tokens in (batch_tokens(cache, limits.max_running),) if tokens]
        trees = {"max_tree_tokens": limits.tree_tokens} if limits.tree_tokens else {}
        batches = [cache.make_batch(limits.max_running, limits.budget, *cross, **trees) for _ in range(num_batches)]
        self._lock = StateLock()
        self._roster = Roster(cache, batches, swap_space, limits.ratios, policy)
