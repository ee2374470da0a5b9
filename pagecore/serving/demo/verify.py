"""Verification of generated tokens against dense attention and recurrence over the finished texts, without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagecore.serving.demo.model import Array, Model, dense_attention
from pagecore.serving.demo.recurrence import recurrence
from pagecore.serving.demo.recurrent import RecurrentInputs
from pagecore.serving.demo.sampling import scores
from pagecore.serving.scheduling.request import Run

__all__ = ["Verdict", "verify"]

# Two scores whose difference is below this share of the largest logit may swap order between float32 and float64.
TIE = 1e-4


@dataclass(slots=True)
class Verdict:
    """Result of the verification; `wrong` lists each token that the computation from scratch would not choose."""

    tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if tokens were checked and none was wrong."""
        return self.tokens > 0 and not self.wrong


def verify(runs: Iterable[Run], model: Model, seed: int, temperature: float) -> Verdict:
    """Recompute each finished text with dense attention and whole recurrences, and compare every generated token.

    Parameters
    ----------
    runs : iterable of Run
        Finished runs; their request ids are ints.
    model : Model
        Model with the same weights, in float64, so that the check is more precise than the checked result.
    seed : int
        Seed of the sampling noise.
    temperature : float
        Sampling temperature of requests with several samples; other requests took the best token.
    """
    verdict = Verdict()
    for run in runs:
        _verify_run(run, model, seed, temperature if run.request.samples > 1 else 0.0, verdict)
    return verdict


def _verify_run(run: Run, model: Model, seed: int, temperature: float, verdict: Verdict) -> None:
    request = run.request
    first = len(request.prompt)
    logits = _logits_from_scratch(model, run.tokens[:-1], first - 1)
    if len(run.tokens) != first + request.max_new_tokens:
        verdict.wrong.append(
            f"request {request.id}, sample {run.sample}: got {len(run.tokens) - first} tokens, expected "
            f"{request.max_new_tokens}"
        )
    for position in range(first, len(run.tokens)):
        given = int(run.tokens[position])
        row = logits[position - first]
        ranked = scores(row, seed, request.id, run.sample, position, temperature)
        best = int(ranked.argmax())
        verdict.tokens += 1
        if given == best:
            continue
        if 0 <= given < len(ranked) and ranked[best] - ranked[given] <= TIE * np.abs(row).max():
            verdict.ties += 1
        else:
            verdict.wrong.append(
                f"request {request.id}, sample {run.sample}, position {position}: got token {given}, "
                f"{'the computation from scratch' if model.recurrent else 'dense attention'} chooses {best}"
            )


def _logits_from_scratch(model: Model, tokens: Array, first: int) -> Array:
    """Return the logits after tokens `first` and later of a text, by attention and recurrence over the whole text."""

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        return dense_attention(query, key, value, model.sizes.layer_window(layer))

    def recur(layer: int, inputs: RecurrentInputs) -> Array:
        return recurrence(model.recurrent[layer], inputs)

    return model.logits(model.forward(tokens, np.arange(len(tokens)), attend, recur)[first:])
