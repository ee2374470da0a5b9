"""Real attention during a replay: every token is written, and sampled rows are checked against float64.

Key, value and query of a token depend only on (token id, position). Prompts with a common prefix therefore have the
same keys and values there, as in a model, and can share them. The expected attention output follows from the request
alone, without the cache, even if its keys were computed by another request or recomputed after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagecore.ops import paged_attention
from pagecore.storage import AttentionSpec
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import PagedKVCache
    from pagecore.serving.scheduling.request import Request
    from pagecore.serving.scheduling.step import Step

__all__ = ["SPEC", "TOLERANCE", "AttendCheck", "TokenVectors", "ids_at", "placeholder_id", "placeholder_ids"]

SPEC = AttentionSpec(num_kv_heads=1, head_dim=64, dtype="float32", num_query_heads=4)
# Largest relative error of any (token, head) row of float32 attention, in the Frobenius norm.
TOLERANCE = 1e-5
TABLE_BITS = 12
CHECKS_BEFORE_THINNING = 128


def placeholder_id(request: Request) -> int:
    """Return the token id that a request generates at every position, in place of ids sampled by a model.

    The ids count down from the largest int32. No prompt of a trace contains them, and no two requests share one.
    """
    return int(placeholder_ids([request])[0])


def placeholder_ids(requests: list[Request]) -> NDArray[np.int32]:
    """Return the `placeholder_id` of each request."""
    return INT32_MAX - np.array([request.id for request in requests], np.int32)


def ids_at(request: Request, positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the token ids of a request at `positions`, from its prompt and its placeholder id, without the cache."""
    length = len(request.prompt)
    prompted = request.prompt[np.minimum(positions, length - 1)]
    return np.where(positions < length, prompted, np.int32(placeholder_id(request)))


class TokenVectors:
    """Pseudo-random float32 vectors of tokens, a function of (token id, position) and the seed.

    Each vector is the sum of one row from each of two tables of normal numbers, selected by a hash: 2^24 different
    vectors for two gathers.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._salt = random.integers(0, 2**64, dtype=np.uint64)
        widths = {"key": 64, "value": 64, "query": 256}
        shape = (2, 1 << TABLE_BITS)
        scale = np.float32(0.5**0.5)
        self._tables = {
            name: random.standard_normal((*shape, width), np.float32) * scale for name, width in widths.items()
        }

    def of(self, name: str, ids: ArrayLike, positions: ArrayLike) -> NDArray[np.float32]:
        """Return the "key" or "value" `[n, 1, 64]` or the "query" `[n, 4, 64]` of n tokens; arguments broadcast."""
        bits = self._hash(np.asarray(ids), np.asarray(positions))
        mask = np.uint64((1 << TABLE_BITS) - 1)
        first, second = self._tables[name]
        vectors: NDArray[np.float32] = first[bits & mask]
        vectors += second[(bits >> np.uint64(TABLE_BITS)) & mask]
        return vectors.reshape(len(bits), -1, 64)

    def _hash(self, ids: NDArray[np.integer], positions: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Hash ids and positions with the finaliser of splitmix64."""
        bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        bits = (bits ^ self._salt) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


class AttendCheck:
    """Writes and attends the steps of a replay, and keeps the largest error.

    Each decode row is attended, and one random query of each prompt chunk. One of these rows in a step is checked
    against float64. After every 128 checks the number of steps between checks doubles, which bounds the cost of a long
    replay.

    Attributes
    ----------
    rows_attended, rows_checked : int
    max_relative_error : float
        Largest error of the checked (token, head) rows, in the Frobenius norm.
    """

    def __init__(self, cache: PagedKVCache, seed: int = 0) -> None:
        self.cache = cache
        self.vectors = TokenVectors(seed)
        self.rows_attended = 0
        self.rows_checked = 0
        self.max_relative_error = 0.0
        self._random = np.random.default_rng((seed, 1))
        self._steps = 0
        self._stride = 1

    @property
    def passed(self) -> bool:
        """True if rows were checked and no error exceeds `TOLERANCE`."""
        return self.rows_checked > 0 and self.max_relative_error <= TOLERANCE

    def run(self, step: Step) -> None:
        """Write and attend a prepared step, as a layer of a model does."""
        batch = step.batch
        count = batch.num_sequences
        lengths = np.asarray(batch.query_lens)[:count]
        requests = [run.request for run in step.runs]
        positions = np.asarray(batch.positions)[: batch.num_tokens]
        ids = _ids_of(requests, positions, lengths, step.num_decodes)
        key, value = (self.vectors.of(name, ids, positions) for name in ("key", "value"))
        self.cache.write(0, key, value, batch)
        # The query is a random token of the chunk; a decode row has one token.
        back = self._random.integers(0, lengths, dtype=np.int32)
        seq_lens = np.asarray(batch.seq_lens)[:count] - back
        query_ids = ids[np.cumsum(lengths) - 1 - back]
        out = self._attend(step, query_ids, seq_lens)
        self.rows_attended += count
        if self._steps % self._stride == 0:
            self._check(out, requests, seq_lens)
        self._steps += 1

    def _attend(self, step: Step, ids: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> NDArray[np.float32]:
        out: NDArray[np.float32] = paged_attention(
            self.vectors.of("query", ids, seq_lens - 1),
            self.cache.key(0),
            self.cache.value(0),
            step.batch.group(0).block_table,
            seq_lens,
            rows=np.asarray(step.batch.rows)[: len(ids)],
        )
        return out

    def _check(self, out: NDArray[np.float32], requests: list[Request], seq_lens: NDArray[np.int32]) -> None:
        """Compare one row with float64 attention over the vectors of its request, computed without the cache."""
        row = int(self._random.integers(len(requests)))
        expected = self.expected(requests[row], int(seq_lens[row]) - 1)
        # Garbage from a fault may overflow the norm or be NaN; both must count as a large error.
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.linalg.norm(out[row] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        worst = float(np.nan_to_num(error, nan=np.inf).max())
        self.max_relative_error = max(self.max_relative_error, worst)
        self.rows_checked += 1
        if self.rows_checked % CHECKS_BEFORE_THINNING == 0:
            self._stride *= 2

    def expected(self, request: Request, position: int) -> NDArray[np.float64]:
        """Return the attention output of the query at `position`, float64 `[4, 64]`, computed without the cache."""
        positions = np.arange(position + 1)
        ids = ids_at(request, positions)
        key, value = (self.vectors.of(name, ids, positions)[:, 0].astype(np.float64) for name in ("key", "value"))
        query = self.vectors.of("query", ids[-1:], positions[-1:])[0].astype(np.float64)
        # einsum instead of @: on a busy machine the threads of a BLAS wait for each other longer than this takes.
        scores = np.einsum("hd,nd->hn", query, key) / np.sqrt(64)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended: NDArray[np.float64] = np.einsum("hn,nd->hd", weights / weights.sum(axis=-1, keepdims=True), value)
        return attended


def _ids_of(
    requests: list[Request], positions: NDArray[np.integer], lengths: NDArray[np.integer], num_decodes: int
) -> NDArray[np.int32]:
    """Return the token ids of a step, row after row: first the decodes with one generated token each, then prompts."""
    ids = np.empty(len(positions), np.int32)
    ids[:num_decodes] = placeholder_ids(requests[:num_decodes])
    start = num_decodes
    for request, length in zip(requests[num_decodes:], lengths[num_decodes:].tolist(), strict=True):
        ids[start : start + length] = ids_at(request, positions[start : start + length])
        start += length
    return ids
