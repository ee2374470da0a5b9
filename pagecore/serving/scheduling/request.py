"""Requests to a scheduler, and the state of each sequence that serves them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pagecore.cache.prefix.retention import Priority, Spans, validate_namespace, validate_spans
from pagecore.errors import InvalidSequence, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.checks import as_array
from pagecore.storage.checks import INT32_MAX, flag, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import Sequence
    from pagecore.serving.scheduling.reuse import Query

__all__ = ["QueueFull", "Request", "RequestError", "Run", "State"]

NO_STOPS: frozenset[int] = frozenset()
# Minimum of each number of a request.
LEAST = {
    "max_new_tokens": 0,
    "min_new_tokens": 0,
    "samples": 1,
    "priority": -INT32_MAX,
    "max_reused_tokens": 0,
    "cross_tokens": 0,
}
OPTIONAL = {"cross_tokens", "max_reused_tokens"}
INT32 = np.dtype(np.int32)


class RequestError(ShapeError):
    """The cache cannot hold the request even when it holds nothing else; the request was not queued."""


class QueueFull(PagecoreError, RuntimeError):
    """The queue of a scheduler has `max_queued` requests; the request was not added, and may be tried again later."""


class State(Enum):
    """waiting -> running -> finished; preemption: running -> waiting; cancel: from any state that is not final.

    Resumable requests: running -> idle at the end of each turn, idle -> waiting for the next one, idle -> finished.
    """

    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt, the number of tokens to generate, the number of samples, and the tokens that end them early.

    Parameters
    ----------
    id : object
        The caller's name for the request, such as a number or a string; the scheduler does not interpret it.
    prompt : array_like of int
        Token ids `[n]`, n >= 1; kept as int32, and aliased if it is an int32 array.
    max_new_tokens : int
        Tokens to generate for each sample; with 0 the prompt is computed and nothing is sampled.
    samples : int
        Number of parallel samples. They share the blocks of the prompt: the cache forks them when the prompt is
        computed.
    namespace : hashable, optional
        Adapter or tenant of the request; requests of different namespaces share no cached prefix.
    stop_token_ids : iterable of int
        A sampled id among these ends its sample, and is its last token; kept as a sorted tuple.
    min_new_tokens : int
        Least number of tokens of a sample that `stop_token_ids` end; an earlier stop id is a token like any other.
        Samplers usually mask the stop ids until then.
    ignore_eos : bool
        If True, `stop_token_ids` end nothing, and an admission reserves all `max_new_tokens` (see `Scheduler`).
    priority : int
        Requests with a larger number go first under the policy "priority"; the other policies ignore it.
    spans : iterable of (int, int, bytes or int), optional
        Positions [start, end) of images or audio in the prompt, with digests of their content, as for
        `PagedKVCache.add_sequence`; kept as a tuple.
    cache_priority, cache_time_to_live : optional
        `priority` and `time_to_live` of `PagedKVCache.add_sequence`, for a cache with the policy "priority": how long
        the blocks of the request stay cached.
    max_reused_tokens : int, optional
        Largest number of tokens that an admission takes from the prefix cache; 0 computes the whole prompt, as
        log-probabilities of the prompt need it. Its blocks are published all the same. By default all that is cached.
    cross_tokens : int, optional
        Number of encoder tokens, for a cache with cross attention. The first step of each run writes them:
        ``step.batch.cross`` has their number for each row, and a run that is recomputed writes them again. 0 for a
        request without an encoder's input, whose cross-attention layers return zeros.
    cross_digest : bytes or int, optional
        Identity of the encoder's input: requests with equal digests share one output and the prefixes of the decoder.
    resumable : bool
        If True, a run is idle when its generation ends, until `Scheduler.extend` continues it with further input or
        `Scheduler.finish` ends it.

    Raises
    ------
    ShapeError
        `prompt` is empty, `prompt` or `stop_token_ids` is not 1-D or has ids that int32 cannot hold, `max_new_tokens`
        or `max_reused_tokens` or `cross_tokens` is negative, `min_new_tokens` is negative or larger than
        `max_new_tokens`, `samples` is below 1, or `priority` is not an integer of int32; spans that cannot be listed or
        are out of range.
    UnsupportedDtype
        `prompt` or `stop_token_ids` is not of integers, `namespace` cannot be compared, or `cross_digest` is neither
        bytes nor an int.
    UnsupportedOption
        `ignore_eos` or `resumable` is not True or False, or `cross_digest` is given without `cross_tokens` or for 0 of
        them.
    """

    id: Any
    prompt: NDArray[np.int32]
    max_new_tokens: int
    samples: int = 1
    namespace: Hashable = None
    _: KW_ONLY
    stop_token_ids: Iterable[int] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    priority: int = 0
    spans: Spans | None = None
    cache_priority: Priority | None = None
    cache_time_to_live: float | None = None
    max_reused_tokens: int | None = None
    cross_tokens: int | None = None
    cross_digest: bytes | int | None = None
    resumable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids(self.prompt, "prompt"))
        if not len(self.prompt):
            raise ShapeError("prompt is empty; expected at least one token id")
        if not isinstance(self.stop_token_ids, tuple) or self.stop_token_ids:
            object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.ignore_eos is not False or self.resumable is not False:
            object.__setattr__(self, "ignore_eos", flag("ignore_eos", self.ignore_eos))
            object.__setattr__(self, "resumable", flag("resumable", self.resumable))
        if not self._has_plain_numbers():
            self._check_numbers()
        if self.namespace is not None:
            validate_namespace(self.namespace)
        if self.spans is not None:
            object.__setattr__(self, "spans", validate_spans(self.spans))
        if self.cross_digest is not None:
            _check_digest(self.cross_digest, self.cross_tokens)

    def _has_plain_numbers(self) -> bool:
        """Return True if the numbers are ints in their ranges, as those of most requests; False says nothing."""
        return (
            type(self.max_new_tokens) is type(self.min_new_tokens) is type(self.samples) is type(self.priority) is int
            and 0 <= self.min_new_tokens <= self.max_new_tokens <= INT32_MAX
            and 1 <= self.samples <= INT32_MAX
            and -INT32_MAX <= self.priority <= INT32_MAX
            and self.max_reused_tokens is None
            and self.cross_tokens is None
        )

    def _check_numbers(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= INT32_MAX:
                raise ShapeError(f"{name} is {shown(value)}; expected an integer between {least} and {INT32_MAX}")
            if type(value) is not int:  # sums and negatives of small NumPy integers wrap
                object.__setattr__(self, name, int(value))
        if self.min_new_tokens > self.max_new_tokens:
            raise ShapeError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {self.max_new_tokens}; generate more "
                "tokens, or lower the minimum"
            )

    @property
    def num_slots(self) -> int:
        """Number of slots that one sample needs; its last token is generated but never computed."""
        return len(self.prompt) + max(self.max_new_tokens - 1, 0)

    def __repr__(self) -> str:
        samples = f", samples={self.samples}" if self.samples > 1 else ""
        return f"Request({self.id!r}, {len(self.prompt)} tokens, max_new_tokens={self.max_new_tokens}{samples})"


def _check_digest(digest: object, num_tokens: int | None) -> None:
    if isinstance(digest, bool) or not isinstance(digest, bytes | int):
        raise UnsupportedDtype(f"cross_digest is a {type(digest).__name__}; expected bytes or an int")
    if not num_tokens:
        raise UnsupportedOption("cross_digest is given without cross_tokens, or with 0 of them; pass both, or neither")


def _stop_ids(given: Iterable[int]) -> tuple[int, ...]:
    if isinstance(given, Iterable) and not isinstance(given, str | bytes) and not hasattr(given, "__array__"):
        given = list(given)
    return tuple(sorted(set(token_ids(given, "stop_token_ids").tolist())))  # type: ignore[arg-type]


def token_ids(given: ArrayLike, name: str) -> NDArray[np.int32]:
    """Return a 1-D array of integers as int32; an int32 array is aliased."""
    if type(given) is np.ndarray and given.dtype == INT32 and given.ndim == 1:
        return given
    ids = as_array(name, given, "a 1-D array of token ids")
    if ids.ndim != 1:
        raise ShapeError(f"{name} has shape {ids.shape}; expected token ids [n]")
    if ids.size and ids.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} has dtype {ids.dtype}; expected integers that fit int32")
    if ids.size and ids.dtype != np.int32:
        for end in (ids.min(), ids.max()):
            if not -(2**31) <= int(end) <= INT32_MAX:
                raise ShapeError(f"{name} has token id {end}; ids must fit int32, whose largest value is {INT32_MAX}")
    return ids.astype(np.int32, copy=False)


def join_ids(given: Listed[ArrayLike], name: Callable[[int], str]) -> tuple[NDArray[np.int32], list[int]]:
    """Return 1-D arrays of integers as one int32 array, and the length of each; `name` names one of them in errors.

    Lists are converted together, which takes a tenth of the time of one after the other.
    """
    try:
        if given and set(map(type, given)) <= {list, tuple}:
            return token_ids(list(chain.from_iterable(given)), "ids"), list(map(len, given))  # type: ignore[arg-type]
        parts = [token_ids(part, "ids") for part in given]
    except (ShapeError, UnsupportedDtype):  # the error of a part is more precise
        parts = [token_ids(part, name(place)) for place, part in enumerate(given)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32), list(map(len, parts))


class Run:
    """One sequence of a request. It represents all samples until the prompt is computed, and one sample after that.

    The scheduler makes the runs and updates their attributes; callers must not write to them.

    Attributes
    ----------
    request : Request
        After `Scheduler.extend` a copy whose prompt has all tokens up to the end of the extension.
    sample : int
        Number of the sample within the request, from 0.
    samples : int
        Number of samples that this run represents; 1 once the samples are forked.
    parent : Run or None
        The first sample of the request; None for the first sample itself.
    siblings : tuple of Run
        The other samples. Set on the first sample only, from the step that completes the prompt until they are forked.
    arrival : int
        Number of requests that were added to the scheduler earlier; each later turn of a run counts as one, too.
    tokens : int32 array
        Tokens to compute at the next admission: the prompt and, after a preemption, the tokens generated so far. Once
        the run is idle or has ended: the prompt and all generated tokens. If the run is swapped out, the first of them
        are already computed.
    displaced : Run or None
        The waiting run of a smaller priority that was cancelled when this one was added to a full queue.
    num_preemptions : int
        Number of times that the run was preempted.
    num_reused_tokens : int
        Tokens of the prompt that were cached at the admission before its first step.
    hit_tokens : dict
        These tokens by the medium that had them, as `PagedKVCache.hit_tokens` returns them; empty until the first step
        of the run is committed. Samples have that of their first sample.
    came_late : bool
        True if it had waited for `max_wait_steps` at its last admission; a sample is like its parent.
    goes_first : bool
        True from a preemption to the next turn: while it waits, it is in front of the runs that were not preempted.
    held : Sequence or None
        The sequence of the run in the cache or, if it is swapped out, in a swap space; otherwise None. None while the
        run is idle.
    prefilling : bool
        True until all tokens that were known at admission are computed.
    state : State
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "came_late",
        "displaced",
        "goes_first",
        "held",
        "held_news",
        "held_room",
        "hit_tokens",
        "last_length",
        "match_length",
        "matched_at",
        "num_preemptions",
        "num_reused_tokens",
        "owner",
        "parent",
        "pinned_news",
        "prefilling",
        "query",
        "request",
        "sample",
        "samples",
        "shared_at",
        "siblings",
        "state",
        "stops",
        "stops_from",
        "tokens",
        "waits_since",
    )

    def __init__(
        self,
        request: Request,
        sample: int = 0,
        samples: int = 1,
        *,
        parent: Run | None = None,
        owner: object = None,
        arrival: int = 0,
    ) -> None:
        self.take_request(request)
        self.sample = sample
        self.samples = samples
        self.parent = parent
        self.siblings: tuple[Run, ...] = ()
        self.owner = owner  # the scheduler that made it
        self.arrival = arrival
        self.tokens = request.prompt
        self.num_preemptions = 0
        self.goes_first = False
        self.num_reused_tokens = 0
        self.hit_tokens: dict[str, int] = {}
        self.query: Query | None = None  # what its first step adds to the statistics of reuse
        self.came_late: bool = parent is not None and parent.came_late
        self.displaced: Run | None = None
        self.held: Sequence | None = None
        self.prefilling = True
        self.state = State.WAITING
        self.waits_since = 0  # step in which it joined the queue
        self.shared_at = -1  # cached tokens at which it waited for an equal prompt
        self.pinned_news = -1  # news of the roster at which its prefix was pinned
        self.held_news = -1  # news of the roster at which it was pinned and held back
        self.held_room = 0  # available blocks at that time
        self.match_length = 0  # tokens of its cached prefix, as "lpm" found them
        self.matched_at = -1  # prompt steps of the roster at that time

    def take_request(self, request: Request) -> None:
        """Set the request, and the lengths at which it ends the run."""
        self.request = request
        self.last_length = len(request.prompt) + request.max_new_tokens
        self.stops = NO_STOPS if request.ignore_eos or not request.stop_token_ids else frozenset(request.stop_token_ids)
        self.stops_from = len(request.prompt) + request.min_new_tokens  # tokens from which stop ids end it

    @property
    def sequence(self) -> Sequence:
        """`held` if it is not None. A waiting run has no sequence unless it is the next one or swapped out.

        Raises
        ------
        InvalidSequence
            The run has no sequence.
        """
        if self.held is None:
            raise InvalidSequence(f"{self!r} has no sequence in the cache; a run has one while it is running")
        return self.held

    @property
    def has_ended(self) -> bool:
        """True once the run is finished or cancelled; both states are final."""
        return self.state is State.FINISHED or self.state is State.CANCELLED

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key of the queue under the policy "priority"; no two runs of a scheduler have the same."""
        return -self.request.priority, self.arrival, self.sample

    @property
    def num_tokens_left(self) -> int:
        """Number of `tokens` that are not computed yet."""
        return len(self.tokens) - (self.held.num_computed_tokens if self.held is not None else 0)

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far, since the last extension."""
        known = len(self.tokens) if self.held is None else self.held.num_tokens
        return known - len(self.request.prompt)

    @property
    def generated(self) -> NDArray[np.int32]:
        """Tokens generated so far, since the last extension; int32."""
        known = self.tokens if self.held is None else np.asarray(self.held.tokens)
        return known[len(self.request.prompt) :]

    def __repr__(self) -> str:
        return f"Run({self.request.id!r}, sample={self.sample}, {self.state.value}, generated={self.num_generated})"
