"""Real attention during a replay: every token is written, and sampled rows are checked against float64.

Key, value and query of a token are a function of (token id, position) alone: prompts that begin alike have the same
keys and values there, as in a model, and may share them. What a row of attention should have been can thus be told
without the cache, also where its keys were computed by another request, or recomputed after a preemption.
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
    from pagecore.serving.request import Request
    from pagecore.serving.step import Step

__all__ = ["SPEC", "TOLERANCE", "AttendCheck", "TokenVectors", "ids_at", "stand_in_id"]

SPEC = AttentionSpec(num_kv_heads=1, head_dim=64, dtype="float32", num_query_heads=4)
# What the worst (token, head) row of float32 attention may be off by, in the Frobenius norm.
TOLERANCE = 1e-5
TABLE_BITS = 12
CHECKS_BEFORE_THINNING = 128


def stand_in_id(request: Request) -> int:
    """The token id of all that a request generates where no model samples: from the top of int32.

    No prompt of a trace reaches there, and no two requests continue alike.
    """
    return INT32_MAX - request.id


def ids_at(request: Request, positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Token ids of a request at some positions, of its prompt and what it generates; the cache is not asked."""
    length = len(request.prompt)
    prompted = request.prompt[np.minimum(positions, length - 1)]
    return np.where(positions < length, prompted, np.int32(stand_in_id(request)))


class TokenVectors:
    """Random-like float32 vectors of tokens, the same for the same (token id, position) and seed.

    Each is the sum of two rows of fixed normal tables, which a hash picks: 2^24 different vectors for two gathers.
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
        """The "key", "value" `[n, 1, 64]` or "query" `[n, 4, 64]` of n tokens; ids and positions broadcast."""
        bits = self._hash(np.asarray(ids), np.asarray(positions))
        mask = np.uint64((1 << TABLE_BITS) - 1)
        first, second = self._tables[name]
        vectors: NDArray[np.float32] = first[bits & mask]
        vectors += second[(bits >> np.uint64(TABLE_BITS)) & mask]
        return vectors.reshape(len(bits), -1, 64)

    def _hash(self, ids: NDArray[np.integer], positions: NDArray[np.integer]) -> NDArray[np.uint64]:
        """The finaliser of splitmix64 over both numbers."""
        bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        bits = (bits ^ self._salt) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


class AttendCheck:
    """Writes and attends the steps of a replay, and keeps the worst error that it found.

    Every decode row is attended, and one query drawn from each chunk of a prompt. Of these, one row a step is checked
    against float64; after every 128 checks the steps between them double, so that a long replay costs little more.

    Attributes
    ----------
    rows_attended, rows_checked : int
    max_relative_error : float
        Of any (token, head) row that was checked, in the Frobenius norm.
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
        """Whether rows were checked and none was further off than float32 may be."""
        return self.rows_checked > 0 and self.max_relative_error <= TOLERANCE

    def run(self, step: Step) -> None:
        """Do to a prepared step what a layer of a model does."""
        batch = step.batch
        count = batch.num_sequences
        lengths = np.asarray(batch.query_lens)[:count]
        requests = [run.request for run in step.runs]
        positions = np.asarray(batch.positions)[: batch.num_tokens]
        ids = _ids_of(requests, positions, lengths, step.num_decodes)
        key, value = (self.vectors.of(name, ids, positions) for name in ("key", "value"))
        self.cache.write(0, key, value, batch)
        # In a chunk of n new tokens the query stands anywhere in it; a decode row has just one.
        back = self._random.integers(0, lengths, dtype=np.int32)
        seq_lens = np.asarray(batch.seq_lens)[:count] - back
        asked = ids[np.cumsum(lengths) - 1 - back]
        out = self._attend(step, asked, seq_lens)
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
        """Compare one row with attention in float64 over the vectors of its request, which the cache had no part in."""
        row = int(self._random.integers(len(requests)))
        expected = self.expected(requests[row], int(seq_lens[row]) - 1)
        # What a fault left in memory may overflow the norm; neither that nor a NaN may pass for small.
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.linalg.norm(out[row] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        worst = float(np.nan_to_num(error, nan=np.inf).max())
        self.max_relative_error = max(self.max_relative_error, worst)
        self.rows_checked += 1
        if self.rows_checked % CHECKS_BEFORE_THINNING == 0:
            self._stride *= 2

    def expected(self, request: Request, position: int) -> NDArray[np.float64]:
        """Attention of the query at `position`, float64 `[4, 64]`, from the request's ids and their vectors alone."""
        positions = np.arange(position + 1)
        ids = ids_at(request, positions)
        key, value = (self.vectors.of(name, ids, positions)[:, 0].astype(np.float64) for name in ("key", "value"))
        query = self.vectors.of("query", ids[-1:], positions[-1:])[0].astype(np.float64)
        # einsum, not @: the threads of a BLAS take longer to meet on a busy machine than this takes in one.
        scores = np.einsum("hd,nd->hn", query, key) / np.sqrt(64)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended: NDArray[np.float64] = np.einsum("hn,nd->hd", weights / weights.sum(axis=-1, keepdims=True), value)
        return attended


def _ids_of(
    requests: list[Request], positions: NDArray[np.integer], lengths: NDArray[np.integer], num_decodes: int
) -> NDArray[np.int32]:
    """Token ids of a step's rows, one after the other; those that decode come first, with one generated token each."""
    ids = np.empty(len(positions), np.int32)
    ids[:num_decodes] = [stand_in_id(request) for request in requests[:num_decodes]]
    start = num_decodes
    for request, length in zip(requests[num_decodes:], lengths[num_decodes:].tolist(), strict=True):
        ids[start : start + length] = ids_at(request, positions[start : start + length])
        start += length
    return ids
