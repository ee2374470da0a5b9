"""What a scheduler is given, and the state it keeps for each sequence that comes of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pagecore.cache.retention import validate_namespace
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import Sequence

__all__ = ["Request", "RequestError", "Run", "State"]


class RequestError(ShapeError):
    """A request that the cache cannot hold even when it is alone in it; it was not queued."""


class State(Enum):
    """waiting -> running -> finished; a preempted run goes back to waiting."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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

    Attributes
    ----------
    request : Request
    sample : int
        Which sample of the request, from 0.
    samples : int
        How many samples this run stands for: more than one only until it is forked.
    tokens : int32 array
        What is to be computed when it is admitted: the prompt, after a preemption with what was generated; when
        finished, the prompt and everything generated. A run that was swapped out has computed its front part already.
    num_generated : int
    num_preemptions : int
        How often it was preempted.
    num_reused_tokens : int
        Tokens of the prompt that the prefix cache had when the request was admitted first.
    held : Sequence or None
        Its place in the cache or, swapped out, in a swap space, while it has one; `sequence` is the same for those who
        know that it has.
    prefilling : bool
        Whether tokens that were known at admission are still to be computed.
    state : State
    """

    __slots__ = (
        "held",
        "num_generated",
        "num_preemptions",
        "num_reused_tokens",
        "prefilling",
        "request",
        "sample",
        "samples",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, sample: int = 0, samples: int = 1) -> None:
        self.request = request
        self.sample = sample
        self.samples = samples
        self.tokens = request.prompt
        self.num_generated = 0
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.held: Sequence | None = None
        self.prefilling = True
        self.state = State.WAITING

    @property
    def sequence(self) -> Sequence:
        """Its sequence in the cache; a run that waits has none, unless it is the next or swapped out."""
        if self.held is None:
            raise InvalidSequence(f"{self!r} has no sequence in the cache; it has one while it is running")
        return self.held

    @property
    def num_tokens_left(self) -> int:
        """Of `tokens`, those that are not computed."""
        return len(self.tokens) - (self.held.num_computed_tokens if self.held is not None else 0)

    @property
    def generated(self) -> NDArray[np.int32]:
        """What was generated, int32: complete once finished; before, as of the last preemption."""
        return self.tokens[len(self.request.prompt) :]

    def __repr__(self) -> str:
        return f"Run({self.request.id!r}, sample={self.sample}, {self.state.value}, generated={self.num_generated})"
