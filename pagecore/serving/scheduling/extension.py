"""Prompts that grow: the request of a run once further tokens follow those that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.serving.scheduling.request import Request, Run

__all__ = ["extended"]


def extended(run: Run, tokens: NDArray[np.int32], max_new_tokens: int | None) -> Request:
    """Return the request of a run with all of its known tokens and `tokens` as prompt; see `Scheduler.extend`."""
    request = run.request
    if not len(tokens):
        raise ShapeError("tokens is empty; expected at least one token id")
    left = request.max_new_tokens - run.num_generated if max_new_tokens is None else max_new_tokens
    if request.samples > 1 and (not left) != (not request.max_new_tokens):
        raise UnsupportedOption(
            f"max_new_tokens is {shown(left)} for a request of {request.samples} samples, and was "
            f"{request.max_new_tokens}; a request with samples cannot begin or cease to generate: add another one"
        )
    known = run.tokens if run.held is None else np.asarray(run.held.tokens)
    prompt = np.concatenate([known, tokens])
    longer = replace(request, prompt=prompt, max_new_tokens=left, min_new_tokens=0)
    least = min(max(request.min_new_tokens - run.num_generated, 0), longer.max_new_tokens)
    return replace(longer, min_new_tokens=least) if least else longer
