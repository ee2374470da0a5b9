"""Options of a replay, checked before anything is read or allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.states import StateLayers, StateSizes
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import check_policy
from pagecore.models import specs_from_config
from pagecore.serving.checks import as_rate, named
from pagecore.serving.hybrid import arrange_hybrid, divide_hybrid, with_checkpoints
from pagecore.serving.replay.clock import ReplayClock
from pagecore.serving.replay.tier_options import TierPlace, parse_bandwidth, parse_place
from pagecore.serving.replay.trace import TraceUnits
from pagecore.serving.replay.trace_turns import Turns, check_turns
from pagecore.serving.scheduling.limits import check_order
from pagecore.serving.scheduling.reuse import NO_REUSE, POLICIES
from pagecore.storage import Spec, StateSpec, TensorParallel, parse_memory
from pagecore.storage.checks import INT32_MAX, as_float, flag, require_int, shown
from pagecore.storage.pools.pool import blocks_within
from pagecore.storage.pools.state_pool import checked_ratio

__all__ = ["DEFAULT_BYTES_PER_TOKEN", "DEFAULT_MEMORY", "UNBOUNDED", "ReplayOptions"]

DEFAULT_MEMORY = "64GiB"
DEFAULT_BYTES_PER_TOKEN = 131072
UNBOUNDED: Literal["unbounded"] = "unbounded"
# Times of the longest trace are finite: 30 years a step.
STEP_MS_MAX = 1e12
# Minimum of each number; the optional numbers may be None.
LIMITS = {"block_size": 1, "max_tokens_per_step": 1, "max_running": 1, "seed": 0}
OPTIONAL_LIMITS = {
    "blocks": 2, "bytes_per_token": 1, "max_queued": 1, "num_states": 3, "prompt_checkpoints": 0, "requests": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of a replay.

    Parameters
    ----------
    memory : int or str, optional
        KV memory of the modelled machine in bytes, or such as "64GiB" (the default). Exclusive with `blocks`.
    blocks : int or "unbounded", optional
        Number of blocks, the null block counted, instead of `memory`. "unbounded" makes the pool large enough for the
        whole trace, so that no block is evicted; the index allocates its own memory when a block is first used.
    bytes_per_token : int, optional
        Bytes of key and value of one token in all layers of the modelled model. The default, 131072, is Llama 3 8B in
        bfloat16.
    model : path or dict, optional
        config.json of the modelled model (see `pagecore.models`), instead of `bytes_per_token`. The cache then has the
        groups of the model. `memory` is divided among them as by `PagedKVCache` without `max_tokens_per_sequence`; with
        `blocks`, each has that number.
    num_states : int, optional
        Number of state slots of a model with recurrent states, the null slot counted. The default has `state_ratio`
        times the bytes of the blocks; with unbounded blocks, a slot for every checkpoint of the trace.
    state_ratio : float
        Bytes of states over bytes of blocks, for a model with both; also in `swap_memory`.
    checkpoint_format : {"int8"}, optional
        Format of the checkpoints of a model with recurrent states, see `StateSpec`.
    prompt_checkpoints : int, optional
        Checkpoints before the end of a prompt, for a model with recurrent states; see `Scheduler`.
    evict : {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:SHARE", "none"}
        Eviction policy of the prefix cache; "none" turns reuse off.
    block_size : int
        Tokens of a block.
    max_tokens_per_step, max_running : int
        Limits of the scheduler.
    policy : {"fcfs", "lpm"}
        Order of admission; see `Scheduler`. The requests of a trace have no priorities.
    swap_memory : int or str, optional
        Bytes of a second memory of the modelled machine, to which preempted requests are swapped out instead of being
        recomputed.
    host : int or str, optional
        Bytes of a host tier of the modelled machine, in which prefixes continue that the device evicts.
    disk, remote : str or int, optional
        A store after the host: a size such as "1TiB" or "unbounded" for one that only counts, or with `attend` a folder
        and the URL of a store, such as ``redis://localhost``, which move the bytes of the replay.
    bandwidth : mapping or sequence of str
        GB/s of "host", "disk" and "remote", such as ``{"disk": 2.5}`` or ``["disk=2.5"]``, from which the report
        derives the time of the transfers.
    prefill_rate : float, optional
        Tokens that the modelled machine computes in a second. With it the replay has a clock: a request is queued when
        it arrives, by its timestamp, and a step takes its tokens over this rate, `step_ms`, and the time of the reads
        of tiers at their `bandwidth`. Without it timestamps only order the requests.
    step_ms : float
        Milliseconds that a step takes in addition, such as the time to read the weights.
    max_queued : int, optional
        Requests that wait for their first admission, at most, in a replay with a clock: a request that arrives while
        this number wait is rejected. By default any number waits.
    turns : {"ids", "prompts"}, optional
        Replay requests of one conversation as turns of one resumable request, which is idle between them: the next
        turn arrives by its timestamp, and not before the end of the one before, in a replay with a clock. With "ids"
        the trace names the conversations, as Qwen-Bailian traces do: by `parent_chat_id`, or by equal ones of
        `chat_id`. With "prompts" a request continues the one with whose prompt its own begins. The cache has rows for
        up to `max_running` idle runs in addition. By default all requests are separate.
    requests : int, optional
        Replay only the first requests of the trace, this number of them.
    hash_block : int, optional
        Tokens that a hash id of the trace names; by default 512, and 16 in a Qwen-Bailian trace.
    time_unit : {"ms", "s"}, optional
        Unit of the timestamps of the trace; by default milliseconds in JSON, and seconds in CSV and in a Qwen-Bailian
        trace.
    prefill_only : bool
        Compute the prompts and generate nothing.
    attend : bool
        Write and attend real keys and values, in a pool with the same number of blocks but small tokens, and check
        sampled rows against float64.
    seed : int
        Seed of the keys and values of `attend`.

    Attributes
    ----------
    layers : tuple of specs or None
        Layers of the model; None without `model`.

    Raises
    ------
    ShapeError
        A number is not an integer, is below its minimum, or does not fit int32; a rate outside 1e-6 to 1e15, or
        `step_ms` outside 0 to 1e12.
    NotEnoughMemory
        The memory holds fewer than two blocks, or two state slots.
    UnsupportedOption
        `memory` and `blocks` are combined, or `model` with `bytes_per_token` or `attend`; `num_states` or
        `prompt_checkpoints` is given for a model without states, or `blocks` for one without attention; the model or
        the policy is not known; `blocks` is a string other than "unbounded"; a flag is not a bool; `time_unit` is not
        known, or `turns`; tiers are given without `host`, or with `evict` "none"; `step_ms`, `max_queued` or `turns`
        is given without `prefill_rate`.
    """

    memory: int | str | None = None
    blocks: int | Literal["unbounded"] | None = None
    bytes_per_token: int | None = None
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None
    num_states: int | None = None
    state_ratio: float = 0.9
    checkpoint_format: str | None = None
    prompt_checkpoints: int | None = None
    evict: str = POLICIES[0]
    block_size: int = 16
    max_tokens_per_step: int = 8192
    max_running: int = 256
    policy: str = "fcfs"
    swap_memory: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    remote: int | str | None = None
    bandwidth: Mapping[str, float] | Sequence[str] = ()
    prefill_rate: float | None = None
    step_ms: float = 0.0
    max_queued: int | None = None
    turns: Turns | None = None
    requests: int | None = None
    hash_block: int | None = None
    time_unit: str | None = None
    prefill_only: bool = False
    attend: bool = False
    seed: int = 0
    layers: tuple[Spec, ...] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.memory is not None and self.blocks is not None:
            raise UnsupportedOption(
                f"memory {shown(self.memory)} and blocks {shown(self.blocks)} exclude each other; pass one of them"
            )
        if isinstance(self.blocks, str) and self.blocks != UNBOUNDED:
            raise UnsupportedOption(f"blocks is {shown(self.blocks)}; expected a number or {UNBOUNDED!r}")
        check_policy(self.evict, "evict", POLICIES)
        if check_order(self.policy) == "priority":
            raise UnsupportedOption(
                "policy is 'priority', but the requests of a trace have no priorities; use 'fcfs' or 'lpm'"
            )
        for name, least in {**LIMITS, **OPTIONAL_LIMITS}.items():
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL_LIMITS) and not (name == "blocks" and self.is_unbounded):
                object.__setattr__(self, name, require_int(name, value, least))
        object.__setattr__(self, "hash_block", self.units.hash_block)
        check_turns(self.turns)
        for name in ("prefill_only", "attend"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if self.checkpoint_format is not None and self.model is None:
            raise UnsupportedOption("checkpoint_format is given without a model; give a model with recurrent states")
        if self.model is not None:
            self._read_model(self.model)
        self._check_states()
        self._check_tiers()
        self._check_clock()
        sizes = (
            ("memory", self.memory, self.num_blocks),
            ("swap_memory", self.swap_memory, self.num_swap_blocks),
            ("host", self.host, max(self.host_blocks, default=0)),
            ("swap_memory", self.swap_memory, self.num_swap_states),
            ("host", self.host, self.host_states),
        )
        for name, memory, blocks in sizes:
            if blocks > INT32_MAX:
                raise ShapeError(
                    f"{name} {shown(memory)} holds {shown(blocks)} blocks; the largest block id is {INT32_MAX}; "
                    "use less memory or a larger block_size"
                )

    @property
    def units(self) -> TraceUnits:
        """Units of the trace."""
        return TraceUnits(self.hash_block, self.time_unit)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Specs of the layers of the model that keep a recurrent state."""
        return tuple(spec for spec in self.layers or () if isinstance(spec, StateSpec))

    @property
    def has_blocks(self) -> bool:
        """False for a model whose layers all keep states."""
        return self.layers is None or len(self.states) < len(self.layers)

    @property
    def is_unbounded(self) -> bool:
        """True if the pool is large enough for the whole trace."""
        return isinstance(self.blocks, str)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the largest pool, the null block counted; 0 if unbounded, when it depends on the trace.

        Raises
        ------
        NotEnoughMemory
            The memory holds fewer than two blocks.
        """
        if isinstance(self.blocks, str):
            return 0
        if self.blocks is not None:
            return self.blocks
        return max(self.group_blocks, default=0)

    @property
    def group_blocks(self) -> list[int]:
        """Number of blocks of each group, or `blocks` for each.

        The memory is divided as by `PagedKVCache(memory=...)` without `max_tokens_per_sequence`: the division does not
        depend on the trace.
        """
        memory = DEFAULT_MEMORY if self.memory is None else self.memory
        if self.layers is None:
            return [self._blocks_within(memory) if self.blocks is None else self.num_blocks]
        return self._divided(memory)[0]

    @property
    def num_slots(self) -> int:
        """Number of state slots, the null slot counted; 0 without states, and for unbounded blocks by default."""
        if not self.states or self.num_states is not None or self.is_unbounded:
            return self.num_states or 0
        return self._divided(DEFAULT_MEMORY if self.memory is None else self.memory)[1].num_states

    @property
    def num_checkpoints(self) -> int:
        """Number of slots of quantised checkpoints, the null slot counted; 0 without them, and for unbounded blocks."""
        if not self.states or self.states[0].checkpoint_format is None or self.is_unbounded:
            return 0
        return self._divided(DEFAULT_MEMORY if self.memory is None else self.memory)[1].num_checkpoints

    def _divided(self, memory: int | str, of_host: bool = False) -> tuple[list[int], StateSizes]:
        """Return the blocks of each group and the state slots of a model, on the device or in the host tier."""
        groups = self._groups()
        one = sum(spec.nbytes for spec in self.states)
        if of_host:  # the tier stores checkpoints alone
            kept = tuple(spec.checkpoint_spec for spec in self.states)
            return divide_hybrid(groups, kept, self.block_size, parse_memory(memory), self.state_ratio)
        if self.blocks is not None:
            held = sum(group.bytes_per_block(self.block_size) for group in groups) * self.num_blocks
            sizes = StateSizes()
            if one and self.states[0].checkpoint_format is None:
                sizes = StateSizes(math.floor(min(max(2, held * self.state_ratio / one) + 1, INT32_MAX)))
            elif one:
                layers = StateLayers(self.states)
                sizes = layers.divide(math.floor(held * self.state_ratio), self.max_running)
            return [self.num_blocks] * len(groups), sizes
        budget = parse_memory(memory)
        return divide_hybrid(
            groups,
            self.states,
            self.block_size,
            budget,
            self.state_ratio,
            self.num_states,
            max_sequences=self.max_running,
        )

    @property
    def num_swap_blocks(self) -> int:
        """Number of blocks of the swap space, the null block counted; 0 without `swap_memory`."""
        if self.swap_memory is None or not self.has_blocks:
            return 0
        held = self.num_swap_states * sum(spec.nbytes for spec in self.states)
        if self.states and self.states[0].checkpoint_format is not None:
            held += self.num_swap_states * sum(spec.checkpoint_nbytes for spec in self.states)
        memory = self.swap_memory
        return named("swap_memory", lambda: blocks_within(parse_memory(memory) - held, self._bytes_per_block()))

    @property
    def num_swap_states(self) -> int:
        """Number of state slots of the swap space, the null slot counted; 0 without `swap_memory` or states."""
        if self.swap_memory is None or not self.states:
            return 0
        given = self.swap_memory

        def divide() -> StateSizes:
            return divide_hybrid(self._groups(), self.states, self.block_size, parse_memory(given), self.state_ratio)[1]

        return named("swap_memory", divide).num_states

    @property
    def host_blocks(self) -> list[int]:
        """Number of blocks of each group of the host tier, the null block counted; empty without `host`."""
        if self.host is None:
            return []
        host = self.host
        if self.layers is None:
            return named("host", lambda: [self._blocks_within(host)])
        return named("host", lambda: self._divided(host, True)[0])

    @property
    def host_states(self) -> int:
        """Number of state slots of the host tier, the null slot counted; 0 without `host` or states."""
        if self.host is None or not self.states:
            return 0
        host = self.host
        return named("host", lambda: self._divided(host, True)[1].num_states)

    @property
    def places(self) -> tuple[TierPlace | None, TierPlace | None]:
        """Places of the disk store and the remote store."""
        disk, remote = (
            None if value is None else parse_place(name, value, self.attend)
            for name, value in (("disk", self.disk), ("remote", self.remote))
        )
        return disk, remote

    @property
    def bytes_per_second(self) -> dict[str, float]:
        """Bandwidth of each medium for which one is given."""
        return parse_bandwidth(self.bandwidth)

    def _blocks_within(self, memory: int | str) -> int:
        return blocks_within(parse_memory(memory), self._bytes_per_block())

    def _read_model(self, model: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if self.bytes_per_token is not None:
            raise UnsupportedOption(
                f"bytes_per_token {self.bytes_per_token} and model exclude each other; pass one of them"
            )
        if self.attend:
            raise UnsupportedOption("attend and model exclude each other; a model is replayed without keys and values")
        specs = specs_from_config(model, block_size=self.block_size)
        object.__setattr__(self, "layers", with_checkpoints(specs, self.checkpoint_format))
        if self.has_blocks:
            return
        if self.blocks is not None and self.blocks != UNBOUNDED:
            raise UnsupportedOption(
                f"blocks is {shown(self.blocks)}, but no layer of the model attends, and there are no blocks; give "
                "memory or num_states instead"
            )

    def _check_states(self) -> None:
        for name in ("num_states", "prompt_checkpoints"):
            if getattr(self, name) is not None and not self.states:
                raise UnsupportedOption(
                    f"{name} is {getattr(self, name)}, but the model has no recurrent states; leave it out"
                )
        object.__setattr__(self, "state_ratio", checked_ratio(self.state_ratio))

    def _check_tiers(self) -> None:
        speeds = self.bytes_per_second or None
        if self.host is None:
            for name, value in (("disk", self.disk), ("remote", self.remote), ("bandwidth", speeds)):
                if value is not None:
                    raise UnsupportedOption(
                        f"{name} is {shown(value)}, but there is no host tier, through which stores are read; give "
                        "host, too"
                    )
        elif self.evict == NO_REUSE:
            raise UnsupportedOption(
                f"host is {shown(self.host)}, but evict is {NO_REUSE!r}: a tier keeps prefixes; drop one"
            )
        _ = self.places

    def _check_clock(self) -> None:
        step_ms = as_float("step_ms", self.step_ms)
        if not 0 <= step_ms <= STEP_MS_MAX:
            raise ShapeError(f"step_ms is {step_ms}; expected milliseconds, from 0 to {STEP_MS_MAX:g}")
        object.__setattr__(self, "step_ms", step_ms)
        if self.prefill_rate is None:
            for name, value in (("step_ms", step_ms), ("max_queued", self.max_queued), ("turns", self.turns)):
                if value:
                    raise UnsupportedOption(
                        f"{name} is {value!r}, but a replay without prefill_rate has no clock; give prefill_rate, too"
                    )
            return
        rate = as_float("prefill_rate", self.prefill_rate)
        if rate == math.inf:
            raise ShapeError("prefill_rate is inf; leave it out for a replay without a clock")
        as_rate("prefill_rate", rate, "tokens a second")
        object.__setattr__(self, "prefill_rate", rate)

    def new_clock(self) -> ReplayClock | None:
        """Return the clock of a replay; None without `prefill_rate`."""
        return None if self.prefill_rate is None else ReplayClock(self.prefill_rate, self.step_ms / 1000)

    def _bytes_per_block(self) -> int:
        """Return the bytes of one block in all groups."""
        if self.layers is None:
            return (self.bytes_per_token or DEFAULT_BYTES_PER_TOKEN) * self.block_size
        return sum(group.bytes_per_block(self.block_size) for group in self._groups())

    def _groups(self) -> list[Group]:
        assert self.layers is not None
        return arrange_hybrid(self.layers, TensorParallel())[0]
