"""Future tokens: the room that an admission leaves for the tokens that running requests will generate.

The figures are those of SGLang: the ratio starts at 0.7 there, decays linearly to 0.14 of its start over 600 steps, and
after a retraction becomes the share of their tokens that the remaining runs have generated, with 20 more for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING

from pagecore.errors import ShapeError
from pagecore.storage.checks import as_float, ceil_div

if TYPE_CHECKING:
    from pagecore.serving.scheduling.request import Run

__all__ = ["Ratios", "add_future", "count_future", "expected_blocks", "future_ratios", "ratio_after_retraction"]

DECAY_STEPS = 600
LEAST_SHARE = 0.14
RETRACT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Ratios:
    """First and smallest ratio, and what each step without a retraction takes from it."""

    first: float
    least: float
    decay: float

    def decayed(self, ratio: float) -> float:
        """Return the ratio after a step without a retraction."""
        return max(ratio - self.decay, self.least)


def future_ratios(new_token_ratio: float | None, conservativeness: float) -> Ratios | None:
    """Check the two arguments of a scheduler; return None if `new_token_ratio` is None.

    Raises
    ------
    ShapeError
        `new_token_ratio` is outside 0 to 1, or `conservativeness` is negative or not finite.
    """
    factor = as_float("conservativeness", conservativeness)
    if not (isfinite(factor) and factor >= 0):
        raise ShapeError(f"conservativeness is {factor}; expected a factor of at least 0")
    if new_token_ratio is None:
        return None
    given = as_float("new_token_ratio", new_token_ratio)
    if not 0 <= given <= 1:
        raise ShapeError(f"new_token_ratio is {given}; expected a share of max_new_tokens between 0 and 1")
    first = min(given * factor, 1.0)
    least = first * LEAST_SHARE
    return Ratios(first, least, (first - least) / DECAY_STEPS)


def ratio_after_retraction(runs: Iterable[Run]) -> float:
    """Return the ratio for the runs that remain after a retraction."""
    generated = total = count = 0
    for run in runs:
        generated += run.num_generated
        total += run.request.max_new_tokens
        count += 1
    return min((generated + RETRACT_STEPS * count) / (total + 1), 1.0)


def count_future(run: Run, ratio: float, block_size: int) -> int:
    """Return the slots that a run is expected to need beyond those of the tokens that are known.

    They are the tokens that it is expected to generate still. Of a run that represents several samples, all but the
    first need blocks of their own from the end of the prompt on, which start with the prompt's last, partial block.
    """
    most = run.request.max_new_tokens
    share = 1.0 if run.request.ignore_eos else ratio
    tokens = max(ceil(share * most - run.num_generated), 0)
    if run.samples == 1 or not tokens:
        return tokens
    prompt = len(run.tokens)
    own_blocks = ceil_div(prompt + tokens, block_size) - prompt // block_size
    return tokens + (run.samples - 1) * own_blocks * block_size


def add_future(runs: list[Run], needs: list[int], ratio: float, block_size: int, max_length: int) -> list[int]:
    """Return the slots that runs need, with those of their future tokens, up to sequences of `max_length` tokens."""
    found: list[int] = []
    for run, need in zip(runs, needs, strict=True):
        held, request = run.held, run.request
        assert held is not None
        if run.samples == 1:  # as `count_future`: each decode of a step comes here
            most = request.max_new_tokens
            share = 1.0 if request.ignore_eos else ratio
            future = ceil(share * most) - most + run.last_length - held.num_tokens
            wanted = need + future if future > 0 else need
        else:
            wanted = need + count_future(run, ratio, block_size)
        left = max_length - held.num_computed_tokens
        found.append(wanted if wanted < left else left)
    return found


def expected_blocks(run: Run, block_size: int, ratio: float | None) -> int:
    """Return the blocks of a running run: those of its known tokens, and with a ratio those of its future tokens."""
    known, capacity = run.sequence.num_tokens, run.sequence.capacity
    future = 0 if ratio is None else count_future(run, ratio, block_size)
    return ceil_div(max(known + future, capacity), block_size)
