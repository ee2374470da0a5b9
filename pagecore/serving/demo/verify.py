"""Was every generated token right? Checked against dense attention, without a cache, over the finished text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagecore.serving.demo.model import Array, Model, dense_attention
from pagecore.serving.demo.sampling import scores
from pagecore.serving.request import Run

__all__ = ["Verdict", "verify"]

# Two scores this close, as a share of the largest logit, may change places between float32 and float64.
TIE = 1e-4


@dataclass(slots=True)
class Verdict:
    """What the check of all texts came to; `wrong` tells of each token that is not what dense attention chooses."""

    tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether tokens were checked and all of them hold."""
        return self.tokens > 0 and not self.wrong


def verify(runs: Iterable[Run], model: Model, seed: int, temperature: float) -> Verdict:
    """Compute each finished text anew, whole and densely, and compare every token that was generated.

    Parameters
    ----------
    runs : iterable of Run
        Finished; request ids are ints. Those of requests with several samples drew at `temperature`, others took the
        best token.
    model : Model
        Of the weights that served them; float64, so that the check is the better computed of the two.
    seed : int
        Of the sampling noise.
    """
    verdict = Verdict()
    for run in runs:
        _verify_run(run, model, seed, temperature if run.request.samples > 1 else 0.0, verdict)
    return verdict


def _verify_run(run: Run, model: Model, seed: int, temperature: float, verdict: Verdict) -> None:
    request = run.request
    logits = _dense_logits(model, run.tokens[:-1])
    first = len(request.prompt)
    if len(run.tokens) != first + request.max_new_tokens:
        verdict.wrong.append(
            f"request {request.id}, sample {run.sample}: {len(run.tokens) - first} tokens instead of "
            f"{request.max_new_tokens}"
        )
    for position in range(first, len(run.tokens)):
        given = int(run.tokens[position])
        row = logits[position - 1]
        ranked = scores(row, seed, request.id, run.sample, position, temperature)
        best = int(ranked.argmax())
        verdict.tokens += 1
        if given == best:
            continue
        if 0 <= given < len(ranked) and ranked[best] - ranked[given] <= TIE * np.abs(row).max():
            verdict.ties += 1
        else:
            verdict.wrong.append(
                f"request {request.id}, sample {run.sample}, position {position}: token {given}, dense attention "
                f"chooses {best}"
            )


def _dense_logits(model: Model, tokens: Array) -> Array:
    """Logits after each token of one text, by attention over all of it at once."""

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        return dense_attention(query, key, value, model.sizes.layer_window(layer))

    return model.logits(model.forward(tokens, np.arange(len(tokens)), attend))
