"""Outputs of encoders that the prompts of a step need, and the budget of their tokens.

An encoder takes as long for an image as the decoder for many tokens of text: a step that computes the first tokens of
ten images makes all decodes wait for ten passes of the encoder. A budget limits the tokens of these outputs. An output
counts if a step computes tokens of its span, or of a prompt with cross attention that has not written it, and if it is
not kept from earlier steps. It counts once for all rows of the step, with the tokens of its longest span: an encoder
computes the whole output, also of a span of which the step or even the prompt has only a part. A part of a prompt ends
in front of the span whose output no longer fits:

    |---- text ----|== image, 700 ==|-- text --|== image, 700 ==|---|    budget: 1,000 encoder tokens
    first part: ------------------------------>|
                                    second part:-------------------->

Prompts after one without a part wait with it. The first prompt of a step has the whole budget, in which every output
fits, so that it always has a part.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import shown

if TYPE_CHECKING:
    from pagecore.cache.prefix.retention import Spans
    from pagecore.serving.scheduling.request import Run

__all__ = [
    "UNLIMITED",
    "EncoderLoad",
    "EncoderSpan",
    "Outputs",
    "all_outputs",
    "check_outputs",
    "encoder_spans",
    "longest_output",
]

# Digests of the encoder outputs that are kept from earlier steps.
Outputs = Container[bytes | int]


class EncoderSpan(NamedTuple):
    """A span whose embeddings a step needs: its row in the step, its positions [start, end), also past the prompt."""

    row: int
    start: int
    end: int
    digest: bytes | int


def check_outputs(embeddings: Outputs) -> Outputs:
    """Return `embeddings`; raise UnsupportedOption if it cannot be asked for digests."""
    if not hasattr(type(embeddings), "__contains__") or isinstance(embeddings, str | bytes):
        raise UnsupportedOption(
            f"embeddings is {shown(embeddings)}; expected an EmbeddingCache, or another container of digests"
        )
    return embeddings


def longest_output(spans: Spans, length: int) -> int:
    """Return the most tokens that an output for a prompt of `length` tokens has."""
    return max((last - first for first, last, _ in spans if first < length), default=0)


def all_outputs(spans: Spans, length: int) -> int:
    """Return the tokens that the outputs for a prompt of `length` tokens have together, equal ones once."""
    sizes: dict[Hashable, int] = {}
    return sum(_enlarge(sizes, digest, last - first) for first, last, digest in spans if first < length)


def _spans(run: Run, computed: int, count: int, outputs: Outputs) -> Iterator[tuple[int, int, bytes | int]]:
    """Yield the spans of which the `count` tokens from `computed` on have a part and whose outputs are not kept."""
    length = len(run.request.prompt)
    for first, last, digest in run.request.spans or ():
        if first >= min(computed + count, length):
            return
        if min(last, length) > computed and digest not in outputs:
            yield first, last, digest


def encoder_spans(runs: list[Run], counts: list[int], num_decodes: int, outputs: Outputs) -> list[EncoderSpan]:
    """Return the spans whose outputs the rows of a step need and that are not kept; the longest span of each digest."""
    found: dict[bytes | int, EncoderSpan] = {}
    for row in range(num_decodes, len(runs)):
        if runs[row].request.spans is not None:
            computed = runs[row].sequence.num_computed_tokens
            for first, last, digest in _spans(runs[row], computed, counts[row], outputs):
                known = found.get(digest)
                if known is None or last - first > known.end - known.start:
                    found[digest] = EncoderSpan(row, first, last, digest)
    return list(found.values())


class EncoderLoad:
    """Encoder outputs of one step.

    Parameters
    ----------
    most : int or None
        Tokens of the outputs that the step may compute; None for any number.
    outputs : container of (bytes or int)
        Digests of the outputs that are kept.
    """

    def __init__(self, most: int | None, outputs: Outputs) -> None:
        self.is_limited = most is not None
        self._left = most
        self._outputs = outputs
        self._sizes: dict[Hashable, int] = {}  # tokens of each output that counts

    def copy(self) -> EncoderLoad:
        """Return a load to which parts can be added on trial."""
        load = EncoderLoad(self._left, self._outputs)
        load._sizes = dict(self._sizes)
        return load

    def fit(self, run: Run, count: int) -> int:
        """Return the tokens of a part of up to `count` tokens whose outputs fit."""
        left = self._left
        if left is None:
            return count
        sizes = dict(self._sizes)
        for first, size, key in self._needed(run, count):
            left -= _enlarge(sizes, key, size)
            if left < 0:
                return max(first - run.sequence.num_computed_tokens, 0)
        return count

    def add(self, run: Run, count: int) -> None:
        """Count the outputs that a part of a prompt needs."""
        if self._left is None:
            return
        for _, size, key in self._needed(run, count):
            self._left -= _enlarge(self._sizes, key, size)

    def needs_output(self, run: Run) -> bool:
        """Return True if the next token of a prompt needs an output that is not kept."""
        return any(True for _ in self._needed(run, 1))

    def last_needs_output(self, run: Run) -> bool:
        """Return True if the last token of a run, which needs no sequence, is in a span whose output is not kept."""
        return any(True for _ in _spans(run, len(run.tokens) - 1, 1, self._outputs))

    def _needed(self, run: Run, count: int) -> Iterator[tuple[int, int, Hashable]]:
        """Yield position, tokens and key of each output that a part needs and that is not kept."""
        request, sequence = run.request, run.sequence
        if request.cross_tokens and not sequence.is_cross_written:
            digest = request.cross_digest
            key = run if digest is None else (request.namespace, digest)
            yield sequence.num_computed_tokens, request.cross_tokens, key
        for first, last, digest in _spans(run, sequence.num_computed_tokens, count, self._outputs):
            yield first, last - first, digest


def _enlarge(sizes: dict[Hashable, int], key: Hashable, size: int) -> int:
    """Let an output have `size` tokens or more; return the tokens that it gains."""
    gained = max(size - sizes.get(key, 0), 0)
    sizes[key] = sizes.get(key, 0) + gained
    return gained


# For parts whose outputs count elsewhere; nothing is added to it.
UNLIMITED = EncoderLoad(None, ())
