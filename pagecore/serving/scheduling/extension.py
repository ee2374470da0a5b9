"""Prompts that grow: the request of a run once further tokens follow those that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pagecore.cache.prefix.retention import validate_spans
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.scheduling.request import State
from pagecore.storage.checks import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache.prefix.retention import Spans
    from pagecore.serving.scheduling.request import Request, Run

__all__ = ["extended"]


def extended(
    run: Run,
    tokens: NDArray[np.int32],
    max_new_tokens: int | None,
    *,
    drop_last: bool = False,
    spans: Spans | None = None,
) -> Request:
    """Return the request of a run with its known tokens and `tokens` as prompt; see `Scheduler.extend`."""
    request, is_idle = run.request, run.state is State.IDLE
    if not len(tokens):
        raise ShapeError("tokens is empty; expected at least one token id")
    if drop_last and not is_idle:
        raise UnsupportedOption(f"drop_last is True, and {run!r} is not idle; drop the last token after its turn")
    generated = 0 if is_idle else run.num_generated
    left = request.max_new_tokens - generated if max_new_tokens is None else max_new_tokens
    if request.samples > 1 and (not left) != (not request.max_new_tokens):
        raise UnsupportedOption(
            f"max_new_tokens is {shown(left)} for a request of {request.samples} samples, and was "
            f"{request.max_new_tokens}; a request with samples cannot begin or cease to generate: add another one"
        )
    known = run.tokens if run.held is None else np.asarray(run.held.tokens)
    if drop_last and run.num_generated:
        known = known[:-1]
    prompt = np.concatenate([known, tokens])
    longer = replace(request, prompt=prompt, max_new_tokens=left, min_new_tokens=0)
    if spans is not None:
        longer = replace(longer, spans=_joined(request.spans or (), spans, len(known), len(tokens)))
    least = min(max(request.min_new_tokens - generated, 0), longer.max_new_tokens)
    return replace(longer, min_new_tokens=least) if least else longer


def _joined(earlier: Spans, spans: Spans, start: int, count: int) -> Spans:
    """Return the spans of a request, and those of its `count` new tokens, which begin at `start`; in order."""
    new = validate_spans(spans)
    outside = [span for span in new if span[1] > count]
    if outside:
        raise ShapeError(
            f"span {outside[0][:2]} ends after the {count} new tokens; spans count from the first of these"
        )
    moved = [(first + start, last + start, digest) for first, last, digest in new]
    return sorted([*earlier, *moved], key=lambda span: span[:2])
