"""Options of a what-if, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import check_policy
from pagecore.serving.checks import as_rate, named
from pagecore.serving.replay.options import DEFAULT_BYTES_PER_TOKEN, UNBOUNDED, ReplayOptions
from pagecore.serving.replay.trace import TraceUnits
from pagecore.serving.scheduling.reuse import POLICIES
from pagecore.storage import parse_memory
from pagecore.storage.checks import as_float, as_tuple, require_int, shown
from pagecore.storage.pools.pool import blocks_within

LRU = "lru"
# Sizes of a range at which a policy is simulated.
SIMULATED_SIZES = 12
# Sums of sizes fit int64.
MEMORY_MAX = 1 << 61


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """Options of a what-if.

    Parameters
    ----------
    memory : int, str, or sequence of these
        One size, a range such as "8GiB..1TiB", or a list of sizes such as "8GiB,64GiB".
    points : int
        Sizes of a range, in equal ratios.
    block_sizes : sequence of int
        Tokens of a block; a curve for each.
    policies : sequence of str
        "lru" is exact at every size; "lfu", "fifo", "mru", "filo", "slru" and "slru:SHARE" are simulated at up to 12
        sizes of a range, or at each of a list.
    bytes_per_token : int, optional
        Bytes of key and value of one token in all layers. The default, 131072, is Llama 3 8B in bfloat16.
    model : path or dict, optional
        config.json of a model, instead of `bytes_per_token`. A model with windows or recurrent states is simulated, as
        policies are; the others have exact curves.
    tiers : mapping of str to memory
        Media and their sizes, fastest first and each larger than the one before: a tier holds what the faster ones
        hold, and more.
    sample : float
        Share of the blocks to follow. Below 1, the curve is an estimate (SHARDS) in memory in proportion to it.
    requests : int, optional
        Use only the first requests of the trace.
    hash_block : int, optional
        Tokens that a hash id of the trace names; by default 512, and 16 in a Qwen-Bailian trace.
    time_unit : {"ms", "s"}, optional
        Unit of the timestamps of hash ids and token ids, by default milliseconds, and of CSV and a Qwen-Bailian trace,
        by default seconds; those of events are seconds.
    prefill_rate : float
        Tokens a second that the modelled machine computes, for the seconds saved.

    Attributes
    ----------
    sizes : list of int
        Memory of each point in bytes, ascending.
    token_bytes, state_bytes : int
        Bytes of a token in all layers that attend, and of a recurrent state in all layers that keep one.

    Raises
    ------
    NotEnoughMemory
        A size holds fewer than two blocks.
    ShapeError
        A number or range is invalid.
    UnsupportedOption
        An unknown policy or time unit; policies, tiers, windows or states with sampling; `model` with
        `bytes_per_token`; a model with an encoder.
    """

    memory: int | str | Sequence[int | str] = "8GiB..1TiB"
    points: int = 57
    block_sizes: tuple[int, ...] = (16,)
    policies: tuple[str, ...] = (LRU,)
    bytes_per_token: int | None = None
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None
    tiers: Mapping[str, int | str] = field(default_factory=dict)
    sample: float = 1.0
    requests: int | None = None
    hash_block: int | None = None
    time_unit: str | None = None
    prefill_rate: float = 10_000.0
    sizes: list[int] = field(default_factory=list, init=False)
    token_bytes: int = field(default=0, init=False)
    state_bytes: int = field(default=0, init=False)
    _is_simulated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "points", require_int("points", self.points, 2, 10_000))
        block_sizes = as_tuple("block_sizes", self.block_sizes, "a list of integers")
        set_field(self, "block_sizes", tuple(require_int("block_size", each) for each in block_sizes))
        set_field(self, "policies", as_tuple("policies", self.policies, "a list of names"))
        if not isinstance(self.tiers, Mapping):
            raise ShapeError(f"tiers is {shown(self.tiers)}; expected a dict of names and memories")
        for policy in self.policies:
            check_policy(policy, known=POLICIES[:-1])
        if not self.block_sizes or not self.policies:
            raise ShapeError("block_sizes or policies are empty; give at least one of each")
        set_field(self, "sample", as_float("sample", self.sample))
        set_field(self, "prefill_rate", as_rate("prefill_rate", self.prefill_rate, "tokens a second"))
        if not 0 < self.sample <= 1:
            raise ShapeError(f"sample is {self.sample}; use a share above 0 and up to 1")
        if self.sample < 1 and (self.policies != (LRU,) or self.tiers):
            raise UnsupportedOption(f"sample is {self.sample}, which only the curve of {LRU!r} supports; use 1")
        if self.requests is not None:
            set_field(self, "requests", require_int("requests", self.requests))
        set_field(self, "hash_block", self.units.hash_block)
        self._read_model()
        set_field(self, "sizes", _sizes(self.memory, self.points))
        self._check_tiers()
        for block_size in self.block_sizes:
            for memory in (self.sizes[0], *map(parse_memory, self.tiers.values())):
                self.capacity(memory, block_size)

    @property
    def units(self) -> TraceUnits:
        """Units of the trace."""
        return TraceUnits(self.hash_block, self.time_unit)

    @property
    def is_simulated(self) -> bool:
        """True for a model whose hits depend on more than the number of blocks: with windows, chunks or states."""
        return self._is_simulated

    def capacity(self, memory: int, block_size: int) -> int:
        """Return the blocks of a size that can be used: all but the null block, of the largest group of a model.

        For a model whose layers all keep states, return the state slots.
        """
        if self.model is None:
            return blocks_within(memory, self.token_bytes * block_size) - 1
        replayed = self.replayed(memory, block_size)
        return (replayed.num_blocks if replayed.has_blocks else replayed.num_slots) - 1

    def replayed(self, memory: int | None, block_size: int, policy: str = LRU) -> ReplayOptions:
        """Return the options of a replay with one prompt at a time; a memory of None evicts nothing."""
        size: dict[str, Any] = {"blocks": UNBOUNDED} if memory is None else {"memory": memory}
        model: dict[str, Any] = {"bytes_per_token": self.token_bytes} if self.model is None else {"model": self.model}
        return ReplayOptions(**size, **model, block_size=block_size, evict=policy, prefill_only=True, max_running=1)

    def simulated_sizes(self) -> list[int]:
        """Return the sizes at which policies are simulated: all that were listed, or some of a range."""
        if not _is_range(self.memory):
            return self.sizes
        which = np.unique(
            np.linspace(0, len(self.sizes) - 1, min(SIMULATED_SIZES, len(self.sizes))).round().astype(int)
        )
        return [self.sizes[i] for i in which]

    def _read_model(self) -> None:
        """Read the bytes of a token, and decide between exact and simulated curves."""
        set_field = object.__setattr__
        if self.model is None:
            given = DEFAULT_BYTES_PER_TOKEN if self.bytes_per_token is None else self.bytes_per_token
            set_field(self, "token_bytes", require_int("bytes_per_token", given, max=None))
            return
        replayed = ReplayOptions(model=self.model, bytes_per_token=self.bytes_per_token)
        groups = replayed._groups()
        if any(group.is_cross for group in groups):
            raise UnsupportedOption(
                "the model has an encoder, and a trace has no encoder tokens; give another model, or bytes_per_token"
            )
        set_field(self, "token_bytes", sum(group.bytes_per_block(16) for group in groups) // 16)
        set_field(self, "state_bytes", sum(spec.nbytes for spec in replayed.states))
        set_field(self, "_is_simulated", bool(replayed.states) or any(group.attended.is_limited for group in groups))
        if self._is_simulated and self.sample < 1:
            raise UnsupportedOption(
                f"sample is {self.sample}, but the model has windows or states, whose hits are simulated; use 1"
            )

    def _check_tiers(self) -> None:
        sizes = [named(f"tier {name}", partial(_checked, size)) for name, size in self.tiers.items()]
        if any(after <= before for before, after in pairwise(sizes)):
            raise ShapeError(
                f"tiers are {shown(dict(self.tiers))}; expected ascending sizes, as each tier also holds what the "
                "faster ones hold"
            )


def _is_range(memory: object) -> bool:
    return isinstance(memory, str) and ".." in memory and "," not in memory


def _sizes(memory: int | str | Sequence[int | str], points: int) -> list[int]:
    if isinstance(memory, str) and "," in memory:
        memory = memory.split(",")
    if isinstance(memory, Sequence) and not isinstance(memory, str | bytes) and memory:
        return sorted({_checked(size) for size in memory})
    if not _is_range(memory):
        return [_checked(memory)]  # type: ignore[arg-type]
    low, _, high = str(memory).partition("..")
    first, last = _checked(low), _checked(high)
    if not first < last:
        raise ShapeError(f"memory is {memory!r}; expected a range from a smaller to a larger size, such as 8GiB..1TiB")
    sizes = np.geomspace(first, last, points).round().astype(np.int64)
    sizes[0], sizes[-1] = first, last
    return sorted({int(size) for size in sizes})


def _checked(memory: int | str) -> int:
    """Return the bytes of a size; raise ShapeError beyond what counts of bytes can hold."""
    nbytes = parse_memory(memory)
    if nbytes > MEMORY_MAX:
        raise ShapeError(f"memory is {memory!r}; use at most {MEMORY_MAX:,} bytes")
    return nbytes
