"""What a replay is told, checked before anything is read or allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pagecore.cache.layers import arrange
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.serving.checks import as_flag
from pagecore.serving.reuse import POLICIES, check_policy
from pagecore.storage import Spec, TensorParallel, parse_memory
from pagecore.storage.checks import INT32_MAX, require_int
from pagecore.storage.pool import blocks_within

__all__ = ["DEFAULT_BYTES_PER_TOKEN", "DEFAULT_MEMORY", "UNBOUNDED", "ReplayOptions"]

DEFAULT_MEMORY = "64GiB"
DEFAULT_BYTES_PER_TOKEN = 131072
UNBOUNDED: Literal["unbounded"] = "unbounded"
# The least value of each number; the optional ones may be None.
LIMITS = {"block_size": 1, "max_tokens_per_step": 1, "max_running": 1, "seed": 0}
OPTIONAL_LIMITS = {"blocks": 2, "bytes_per_token": 1, "requests": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed.

    Parameters
    ----------
    memory : int or str, optional
        Bytes of KV memory of the modelled machine, such as "64GiB" (the default); exclusive with `blocks`.
    blocks : int or "unbounded", optional
        Blocks instead of bytes, the null block counted. "unbounded" is as many as all of the trace can fill, so that
        nothing is ever given up; of the index, memory is taken as blocks are first used.
    evict : {"lru", "lfu", "fifo", "mru", "filo", "slru", "none"}
        Which cached blocks go first when blocks are short; with "none", nothing is kept for reuse.
    bytes_per_token : int, optional
        Key and value of one token in all layers of the modelled model; 131072, the default, is Llama 3 8B in bfloat16.
    model : path or dict, optional
        The modelled model's config.json (see `pagecore.models`), instead of `bytes_per_token`: the cache has its
        groups, and its bytes a token. `blocks` are then those of each group.
    block_size : int
        Tokens a block.
    max_tokens_per_step, max_running : int
        Limits of the scheduler.
    swap_memory : int or str, optional
        Bytes of a second memory of that machine, where preempted requests wait instead of being computed again.
    requests : int, optional
        Replay only this many of the trace's requests.
    prefill_only : bool
        Compute prompts, and generate nothing.
    attend : bool
        Write and attend real key and value in a small pool of as many blocks, and check samples against float64.
    seed : int
        Of the key and value that `attend` makes up.

    Attributes
    ----------
    layers : tuple of specs or None
        Those of the model.

    Raises
    ------
    ShapeError
        A number that is not an integer, below its least value or past int32.
    NotEnoughMemory
        Memory for fewer than two blocks.
    UnsupportedOption
        Both `memory` and `blocks`; a `model` together with `bytes_per_token` or `attend`, or one that is not known; an
        unknown policy; blocks that are another word; a flag that is not a bool.
    """

    memory: int | str | None = None
    blocks: int | Literal["unbounded"] | None = None
    bytes_per_token: int | None = None
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None
    evict: str = POLICIES[0]
    block_size: int = 16
    max_tokens_per_step: int = 8192
    max_running: int = 256
    swap_memory: int | str | None = None
    requests: int | None = None
    prefill_only: bool = False
    attend: bool = False
    seed: int = 0
    layers: tuple[Spec, ...] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.memory is not None and self.blocks is not None:
            raise UnsupportedOption(
                f"memory {self.memory!r} and blocks {self.blocks} exclude each other; leave one out"
            )
        if isinstance(self.blocks, str) and self.blocks != UNBOUNDED:
            raise UnsupportedOption(f"blocks is {self.blocks!r}; give a number, or {UNBOUNDED!r}")
        check_policy(self.evict)
        for name, least in {**LIMITS, **OPTIONAL_LIMITS}.items():
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL_LIMITS) and not (name == "blocks" and self.is_unbounded):
                object.__setattr__(self, name, require_int(name, value, least))
        for name in ("prefill_only", "attend"):
            as_flag(name, getattr(self, name))
        if self.model is not None:
            self._read_model(self.model)
        sizes = (("memory", self.memory, self.num_blocks), ("swap_memory", self.swap_memory, self.num_swap_blocks))
        for name, memory, blocks in sizes:
            if blocks > INT32_MAX:
                raise ShapeError(
                    f"{name} {memory!r} comes to {blocks} blocks; block ids end at {INT32_MAX}: "
                    "give less memory or a larger block_size"
                )

    @property
    def is_unbounded(self) -> bool:
        """Whether the pool holds all that the trace can fill."""
        return isinstance(self.blocks, str)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block counted; 0 where the trace says how many.

        Raises
        ------
        NotEnoughMemory
            The memory holds fewer than two.
        """
        if isinstance(self.blocks, str):
            return 0
        if self.blocks is not None:
            return self.blocks
        return self._blocks_within(DEFAULT_MEMORY if self.memory is None else self.memory)

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of the swap space, the null block counted; 0 where there is none."""
        return 0 if self.swap_memory is None else self._blocks_within(self.swap_memory)

    def _blocks_within(self, memory: int | str) -> int:
        return blocks_within(parse_memory(memory), self._bytes_per_block())

    def _read_model(self, model: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if self.bytes_per_token is not None:
            raise UnsupportedOption(
                f"bytes_per_token {self.bytes_per_token} and model exclude each other; the model has bytes of its own"
            )
        if self.attend:
            raise UnsupportedOption("attend and model exclude each other; a model is replayed without bytes")
        object.__setattr__(self, "layers", tuple(specs_from_config(model)))

    def _bytes_per_block(self) -> int:
        """One block of every group."""
        if self.layers is None:
            return (self.bytes_per_token or DEFAULT_BYTES_PER_TOKEN) * self.block_size
        _, groups = arrange(self.layers, None, TensorParallel())
        return sum(group.bytes_per_block(self.block_size) for group in groups)
