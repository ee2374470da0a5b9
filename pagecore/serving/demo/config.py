"""Configuration of the demo, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import check_policy
from pagecore.serving.checks import as_instance, named
from pagecore.serving.demo.hybrid import HybridSizes
from pagecore.serving.demo.model import ModelSizes
from pagecore.serving.scheduling.reuse import POLICIES
from pagecore.storage import parse_memory
from pagecore.storage.checks import as_float, flag, require_int, shown

__all__ = ["DemoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Requests, limits and memory of the demo.

    By default the pools hold about half of the sequences that could run at once, so that runs are preempted.

    Parameters
    ----------
    seed : int
        Seed of weights, prompts and sampling.
    num_requests : int
        Chat turns to serve.
    block_size : int
        Tokens of a block.
    num_blocks : tuple of int
        Blocks of each group of the model, the null block counted. The group with a sliding window needs fewer, because
        blocks that its window has passed are freed.
    num_states : int, optional
        State slots of a model with recurrent layers, the null slot counted; None for other models.
    max_running, max_tokens_per_step : int
        Limits of the scheduler.
    max_length : int
        Tokens of the longest sequence.
    temperature : float
        Sampling temperature of requests with several samples; the others take the best token.
    swap : bool
        Swap preempted runs out to a second memory with as much room as the pools, instead of recomputing them.
    host : int or str, optional
        Memory of a host tier, such as "64MiB", for prefixes that the pools evict; None for none.
    evict : {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:SHARE", "none"}
        Eviction policy of the prefix cache; "none" turns reuse off.
    model : ModelSizes

    Raises
    ------
    ShapeError
        A number is out of its range.
    UnsupportedOption
        `evict` is unknown, `swap` or `model` has another type, or `num_states` is given for a model without states.
    """

    seed: int = 0
    num_requests: int = 24
    block_size: int = 16
    num_blocks: tuple[int, ...] = (85, 53)
    num_states: int | None = None
    max_running: int = 12
    max_tokens_per_step: int = 96
    max_length: int = 448
    temperature: float = 0.8
    swap: bool = False
    host: int | str | None = None
    evict: str = POLICIES[0]
    model: ModelSizes = field(default_factory=ModelSizes)

    def __post_init__(self) -> None:
        require_int("seed", self.seed, 0)
        for name in ("num_requests", "block_size", "max_running", "max_tokens_per_step", "max_length"):
            require_int(name, getattr(self, name))
        groups = as_instance("model", self.model, ModelSizes).num_groups
        if not isinstance(self.num_blocks, tuple) or len(self.num_blocks) != groups:
            raise ShapeError(
                f"num_blocks is {shown(self.num_blocks)}; expected a tuple with one number for each of the {groups} "
                "groups"
            )
        for blocks in self.num_blocks:
            require_int("num_blocks", blocks, 2)
        if not 0 <= as_float("temperature", self.temperature) < math.inf:
            raise ShapeError(f"temperature is {self.temperature}; expected a finite number, 0 or more")
        object.__setattr__(self, "swap", flag("swap", self.swap))
        check_policy(self.evict, "evict", POLICIES)
        if self.host is not None:
            named("host", partial(parse_memory, self.host, "cpu"))
            if self.evict == "none":
                raise UnsupportedOption("host is given, but evict is 'none': a host tier keeps prefixes; use 'lru'")
        if isinstance(self.model, HybridSizes):
            require_int("num_states", 0 if self.num_states is None else self.num_states, 2)
        elif self.num_states is not None:
            raise UnsupportedOption(
                f"num_states is {shown(self.num_states)}, but the model has no states; leave it out"
            )

    @classmethod
    def hybrid(cls, **options: Any) -> DemoConfig:
        """Return the configuration of a hybrid model; `options` replace its defaults.

        About half of the sequences that could run at once fit into its blocks, and its slots are short, too.
        """
        defaults: dict[str, Any] = {"model": HybridSizes(), "num_blocks": (85,), "num_states": 33}
        return cls(**(defaults | options))
