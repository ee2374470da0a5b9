"""Quantised caches on the host: decode, prefill and writes of each format, against bfloat16 in the same run.

Every format holds the same random key and value in the same scattered blocks. The relative error of a format compares
its output with that over bfloat16, by the Frobenius norm. Attention takes turns over copies of the caches that exceed
the last-level cache, as the layers of a model do. A write reads the same bytes as the write of bfloat16, so the ratio
of their times is the ratio of bytes read. If OpenVINO can be imported, a step over int8_token (the write of a token of
each sequence, and its attention) is compared with one over OpenVINO's 8-bit cache.

"kivi2" and "kivi4" are sealed blocks and 128 plain tokens of each sequence; they have rows for decode alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from bench.harness.arrays import huge_empty
from bench.harness.runner import Bench, Work
from bench.harness.targets import FORMAT_DECODE_RATIO_MIN, FORMAT_PEER_RATIO_MIN, FORMAT_WRITE_RATIO_MIN
from bench.harness.turns import in_turns
from bench.host.attention_controls import on_threads, thread_counts
from bench.host.attention_load import Load, Paged, Shape
from bench.host.sealed_load import BLOCK as SEALED_BLOCK
from bench.host.sealed_load import Sealed
from bench.peers import PeerMissing, openvino
from pagecore import paged_attention, quantize, write_kv
from pagecore.arrays.dtypes.formats import FORMATS, SEALED_FORMATS, Format

PLAIN, BLOCK = "bfloat16", 16
DRAM = Shape(32, 8, 128, 8, 16384)
PROMPT = 2048
WRITTEN = {2048: BLOCK, 8: 1}  # tokens of a write and of each of its blocks: a prompt, and a step of decode
POISON = 0xFF  # as a float8 code it is NaN
# Largest relative error of the output, by the bits of a code.
ERROR_MAX = {8: 0.1, 4: 0.35, 2: 0.8}
CHUNK = 4096  # blocks that are quantised at a time


def bits_of(format: Format) -> int:
    """Return the bits of a code."""
    return 8 // format.codes_per_byte


class Stored:
    """The key and value of a paged load in a format, in the same blocks.

    Attributes
    ----------
    name : str
        Name of the format.
    bits : int
        Bits of a code.
    block_size : int
    caches : list of two arrays ``[blocks, block size, kv heads, codes]``
    scales : dict
        The arguments key_scale and value_scale of the ops.
    nbytes : int
        Bytes of the codes and scales of the load.
    """

    def __init__(self, paged: Paged, format: Format) -> None:
        blocks, _, heads, dim = paged.key_cache.shape
        self.name, self.bits, self.block_size = format.name, bits_of(format), BLOCK
        self._paged = paged
        self.caches, planes = [], []
        for _ in range(2):
            self.caches.append(_by_head(blocks, heads, format.row_codes(dim), str(format.dtype)))
            if format.scale_dtype is not None:
                planes.append(_by_head(blocks, heads, format.row_scales(dim), str(format.scale_dtype)))
        self.scales: dict[str, Any] = dict(zip(("key_scale", "value_scale"), planes, strict=False)) if planes else {}
        rows = format.row_codes(dim) * format.dtype.itemsize
        rows += format.row_scales(dim) * (format.scale_dtype.itemsize if format.scale_dtype is not None else 0)
        self.nbytes = 2 * paged.table.size * BLOCK * heads * rows
        for first in range(0, blocks, CHUNK):
            part = slice(first, min(first + CHUNK, blocks))
            key, value = (
                np.ascontiguousarray(cache[part]).reshape(-1, heads, dim)
                for cache in (paged.key_cache, paged.value_cache)
            )
            self.write(key, value, np.arange(part.start * BLOCK, part.stop * BLOCK))

    def write(self, key: np.ndarray, value: np.ndarray, slots: np.ndarray) -> None:
        """Quantise rows into slots."""
        key_cache, value_cache = self.caches
        write_kv(key, value, key_cache, value_cache, slots, format=self.name, **self.scales)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Return the caches, and the planes of scales that there are."""
        return [*self.caches, *self.scales.values()]

    def attend(self, arrays: list[np.ndarray], query: np.ndarray, out: np.ndarray, **options: Any) -> Work:
        """Return a call of attention over `arrays`, which are `arrays` of this load or copies, into `out`."""
        scales = dict(zip(self.scales, arrays[2:], strict=True))
        return _attention(query, self._paged, arrays[:2], out, **scales, **options)


def _by_head(blocks: int, heads: int, width: int, dtype: str) -> np.ndarray:
    memory = huge_empty((blocks, heads, BLOCK, width), dtype)
    memory.view(np.uint8)[...] = 0
    return memory.swapaxes(1, 2)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run decode from DRAM, a prompt, and writes of every format."""
    shape = bench.pick(DRAM, replace(DRAM, sequences=2, context=256), replace(DRAM, context=8192))
    threads = thread_counts(bench)
    threads = bench.pick(threads, threads[-1:], threads[-1:])
    paged = Paged(Load(shape, PLAIN))
    prompt = Paged(Load(replace(DRAM, sequences=1, context=bench.pick(PROMPT, 64)), PLAIN))
    for format in FORMATS.values():
        stored = Stored(paged, format)
        for count in threads:
            _decode(bench, shape, paged, stored, count)
        if format.name == "int8_token":
            _peer(bench, shape, paged, stored, threads[-1])
        _prefill(bench, prompt, Stored(prompt, format), threads[-1])
        for count in threads:
            for tokens, in_block in bench.pick(WRITTEN, {64: BLOCK, 8: 1}).items():
                _write(bench, paged, stored, count, tokens, in_block)
    in_sealed_blocks = Paged(Load(shape, PLAIN), SEALED_BLOCK)
    for name in SEALED_FORMATS:
        sealed = Sealed(in_sealed_blocks, name)
        for count in threads:
            _decode(bench, shape, paged, sealed, count)


def _attention(query: np.ndarray, paged: Paged, caches: list[np.ndarray], out: np.ndarray, **options: Any) -> Work:
    key_cache, value_cache = caches
    return lambda: paged_attention(query, key_cache, value_cache, paged.table, paged.seq_lens, out=out, **options)


def _compare(
    bench: Bench,
    name: str,
    paged: Paged,
    stored: Stored | Sealed,
    query: np.ndarray,
    count: int,
    options: dict[str, Any],
    **about: Any,
) -> None:
    """Compare attention over a format with attention over bfloat16, and print the error of the output."""
    out, exact = np.empty_like(query), np.empty_like(query)
    ours = in_turns(bench, stored.arrays, lambda arrays: stored.attend(arrays, query, out, **options))
    caches = [paged.key_cache, paged.value_cache]
    plain = in_turns(bench, caches, lambda arrays: _attention(query, paged, arrays, exact, **options))
    title = f"{name}, {stored.name}, {count} thread{'s' if count > 1 else ''}"

    def check() -> None:
        out[...] = np.nan
        ours()
        plain()
        expected = exact.astype(np.float32)
        error = float(np.linalg.norm(out.astype(np.float32) - expected) / np.linalg.norm(expected))
        bench.fact(f"error of {title}", error)
        assert error <= ERROR_MAX[stored.bits], f"relative error {error:.3g}"

    with on_threads(count, None):
        bench.compare(title, ours, {PLAIN: plain}, check=check, **about)


def _decode(bench: Bench, shape: Shape, paged: Paged, stored: Stored | Sealed, count: int) -> None:
    """Decode: one query of each sequence. Sealed blocks save memory, not time: they have no target."""
    least = FORMAT_DECODE_RATIO_MIN[stored.bits] if isinstance(stored, Stored) else None
    _compare(
        bench,
        f"decode {shape.title}",
        paged,
        stored,
        shape.query(PLAIN, shape.sequences),
        count,
        {},
        nbytes=stored.nbytes,
        at_least={PLAIN: least} if least is not None and count == 2 else None,
        sizes=shape.sizes | {"format": stored.name, "threads": count, "block_size": stored.block_size, "heads": "HND"},
    )


def _peer(bench: Bench, shape: Shape, paged: Paged, stored: Stored, count: int) -> None:
    """Write a token of each sequence and attend, on both sides from float32 and over the same keys and values."""
    heads, dim, sequences, context = (shape.query_heads, shape.kv_heads), shape.dim, shape.sequences, shape.context
    try:
        theirs = openvino.PeerCache(heads, dim, sequences, context, count)
    except PeerMissing as reason:
        bench.note(str(reason))
        return
    for sequence, blocks in enumerate(paged.table):
        theirs.fill(sequence, *(cache[blocks].reshape(context, -1) for cache in (paged.key_cache, paged.value_cache)))
    random = np.random.default_rng(0)
    query = random.standard_normal((sequences, shape.query_heads, dim), dtype=np.float32)
    new = random.standard_normal((2, sequences, shape.kv_heads, dim), dtype=np.float32)
    theirs.set_step(query.reshape(sequences, -1), *new.reshape(2, sequences, -1))
    slots = paged.table[:, -1].astype(np.int64) * BLOCK + BLOCK - 1
    out = np.empty_like(query)
    attend = stored.attend(stored.arrays, query, out)

    def ours() -> None:
        stored.write(new[0], new[1], slots)
        attend()

    def check() -> None:
        ours()
        theirs()
        error = float(np.linalg.norm(theirs.out.reshape(out.shape) - out) / np.linalg.norm(out))
        assert error <= ERROR_MAX[8], f"the outputs differ by {error:.3g}"

    with on_threads(count, None):
        bench.compare(
            f"step {shape.title}, {stored.name}, float32 queries, {count} thread{'s' if count > 1 else ''}",
            ours,
            {openvino.NAME: theirs},
            check=check,
            nbytes=stored.nbytes,
            at_least={openvino.NAME: FORMAT_PEER_RATIO_MIN} if count == 2 else None,
            sizes=shape.sizes | {"format": stored.name, "threads": count, "block_size": BLOCK},
        )


def _prefill(bench: Bench, paged: Paged, stored: Stored, count: int) -> None:
    """Prefill: a causal prompt whose keys and values are stored already."""
    length = int(paged.seq_lens[0])
    shape = replace(DRAM, sequences=1, context=length)
    _compare(
        bench,
        f"prefill {length:,} causal",
        paged,
        stored,
        shape.query(PLAIN, length),
        count,
        {"cu_query_lens": np.array([0, length], np.int32)},
        unit="ms",
        sizes=shape.sizes | {"format": stored.name, "threads": count, "block_size": stored.block_size, "heads": "HND"},
    )


def _slots(blocks: int, tokens: int, in_block: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return the slots of calls: the first `in_block` slots of scattered blocks, `tokens` in a call."""
    count = tokens // in_block
    order = random.permutation(np.arange(1, blocks))[: (blocks - 1) // count * count]
    return [(part[:, None] * BLOCK + np.arange(in_block)).reshape(-1) for part in order.reshape(-1, count)]


def _write(bench: Bench, paged: Paged, stored: Stored, count: int, tokens: int, in_block: int) -> None:
    """Write new keys and values to other slots in each call. A write of whole blocks has a target."""
    blocks, _, heads, dim = paged.key_cache.shape
    random = np.random.default_rng(0)
    new = random.standard_normal((2, tokens, heads, dim), dtype=np.float32).astype(paged.key_cache.dtype)
    slots = _slots(blocks, tokens, in_block, random)
    ours_slots, plain_slots = cycle(slots), cycle(slots)
    plain = [_by_head(blocks, heads, dim, PLAIN) for _ in range(2)]

    def ours() -> None:
        stored.write(new[0], new[1], next(ours_slots))

    def control() -> None:
        write_kv(new[0], new[1], plain[0], plain[1], next(plain_slots))

    def check() -> None:
        where = next(ours_slots)
        place = where // BLOCK, where % BLOCK
        caches = [cache.view(np.uint8) for cache in stored.caches]
        for cache in caches:
            cache[place] = POISON
        stored.write(new[0], new[1], where)
        for rows, cache in zip(new, caches, strict=True):
            codes, _ = quantize(rows, stored.name)
            assert np.array_equal(cache[place], codes.view(np.uint8)), "the written codes differ from those of quantize"

    with on_threads(count, None):
        bench.compare(
            f"write {tokens:,}, {heads} x {dim}, {stored.name}, {count} thread{'s' if count > 1 else ''}",
            ours,
            {PLAIN: control},
            check=check,
            nbytes=new.nbytes,
            at_least={PLAIN: FORMAT_WRITE_RATIO_MIN} if in_block == BLOCK else None,
            sizes={
                "tokens": tokens,
                "tokens_in_block": in_block,
                "kv_heads": heads,
                "head_dim": dim,
                "format": stored.name,
                "threads": count,
            },
        )
