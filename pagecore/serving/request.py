"""What a scheduler is given, and the state it keeps for each sequence that comes of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pagecore.cache.prefix.retention import validate_namespace
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import Sequence

__all__ = ["Request", "RequestError", "Run", "State"]


class RequestError(ShapeError):
    """A request that the cache cannot hold even when it is alone in it; it was not queued."""


class State(Enum):
    """waiting -> running -> finished; a preempted run goes back to waiting; both may become cancelled."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and how much is wanted of it.

    Parameters
    ----------
    id : int
        The caller's number for it; the scheduler only carries it.
    prompt : array_like of int
        Token ids `[n]`, n >= 1; kept as int32, not copied when it is int32 already.
    max_new_tokens : int
        Tokens to generate for each sample; with 0 the prompt is computed and nothing is sampled.
    samples : int
        Parallel samples that share the blocks of the prompt (the cache forks them when the prompt is computed).
    namespace : hashable, optional
        Whose it is (an adapter, a tenant): requests of different namespaces reuse nothing of each other.

    Raises
    ------
    ShapeError
        A prompt that is empty, not 1-D, or with ids that int32 cannot hold; a negative count; no sample.
    UnsupportedDtype
        A prompt that is not of integers; a namespace that cannot be compared.
    """

    id: int
    prompt: NDArray[np.int32]
    max_new_tokens: int
    samples: int = 1
    namespace: Hashable = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids(self.prompt, "prompt"))
        if not len(self.prompt):
            raise ShapeError("prompt is empty; at least one token id is needed")
        for name, least in (("max_new_tokens", 0), ("samples", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= INT32_MAX:
                raise ShapeError(f"{name} is {value!r}; an integer between {least} and {INT32_MAX} is needed")
        validate_namespace(self.namespace)

    @property
    def num_slots(self) -> int:
        """Slots that one sample needs when it ends: the last token that is generated is never computed."""
        return len(self.prompt) + max(self.max_new_tokens - 1, 0)


def token_ids(given: ArrayLike, name: str) -> NDArray[np.int32]:
    """Any 1-D array of integers that fit, as int32; not copied where it is int32 already."""
    try:
        ids = np.asarray(given)
    except ValueError as ragged:
        raise ShapeError(f"{name} must be one list of token ids: {ragged}") from None
    if ids.ndim != 1:
        raise ShapeError(f"{name} has shape {ids.shape}; token ids [n] are needed")
    if ids.size and ids.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} has dtype {ids.dtype}; give integers that fit int32")
    if ids.size and ids.dtype != np.int32:
        for end in (ids.min(), ids.max()):
            if not -(2**31) <= int(end) <= INT32_MAX:
                raise ShapeError(f"{name} has token id {end}, which does not fit int32; ids end at {INT32_MAX}")
    return ids.astype(np.int32, copy=False)


class Run:
    """One sequence of a request: all of its samples until the prompt is computed, one sample from then on.

    A scheduler makes its runs and keeps their attributes; for everybody else they are read-only.

    Attributes
    ----------
    request : Request
    sample : int
        Number of the sample within the request, from 0.
    samples : int
        Samples that this run represents: more than one only until it is forked.
    parent : Run or None
        The first sample, for the others.
    siblings : tuple of Run
        The other samples, for the first one, from the step that ends the prompt until they are forked.
    arrival : int
        Requests that were added to the scheduler earlier.
    tokens : int32 array
        Tokens to compute at the next admission: the prompt and, after a preemption, what was generated so far. Once the
        run has ended: the prompt and everything generated. A run that was swapped out has computed the first of them.
    num_preemptions : int
        How often it was preempted.
    num_reused_tokens : int
        Tokens of the prompt that the prefix cache had at the first admission.
    held : Sequence or None
        Its sequence in the cache or, swapped out, in a swap space; None while it has neither.
    prefilling : bool
        True while tokens that were known at admission are still to be computed.
    state : State
    """

    __slots__ = (
        "arrival",
        "held",
        "last_length",
        "num_preemptions",
        "num_reused_tokens",
        "owner",
        "parent",
        "prefilling",
        "request",
        "sample",
        "samples",
        "siblings",
        "state",
        "tokens",
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
        self.request = request
        self.sample = sample
        self.samples = samples
        self.parent = parent
        self.siblings: tuple[Run, ...] = ()
        self.owner = owner  # the scheduler that made it
        self.arrival = arrival
        self.tokens = request.prompt
        self.last_length = len(request.prompt) + request.max_new_tokens
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.held: Sequence | None = None
        self.prefilling = True
        self.state = State.WAITING

    @property
    def sequence(self) -> Sequence:
        """`held`, which must not be None; a waiting run has none unless it is the next one or swapped out.

        Raises
        ------
        InvalidSequence
            The run has no sequence.
        """
        if self.held is None:
            raise InvalidSequence(f"{self!r} has no sequence in the cache; it has one while it is running")
        return self.held

    @property
    def has_ended(self) -> bool:
        """True once the run is finished or cancelled; it never changes again."""
        return self.state is State.FINISHED or self.state is State.CANCELLED

    @property
    def num_tokens_left(self) -> int:
        """Number of `tokens` that are not computed."""
        return len(self.tokens) - (self.held.num_computed_tokens if self.held is not None else 0)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        known = len(self.tokens) if self.held is None else self.held.num_tokens
        return known - len(self.request.prompt)

    @property
    def generated(self) -> NDArray[np.int32]:
        """The generated tokens, int32: all of them once the run has ended; before, those of the last preemption."""
        return self.tokens[len(self.request.prompt) :]

    def __repr__(self) -> str:
        return f"Run({self.request.id!r}, sample={self.sample}, {self.state.value}, generated={self.num_generated})"
