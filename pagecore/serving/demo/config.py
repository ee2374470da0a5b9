"""Configuration of the demo, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagecore.errors import ShapeError
from pagecore.serving.checks import as_flag, as_instance
from pagecore.serving.demo.model import ModelSizes
from pagecore.serving.reuse import POLICIES, check_policy
from pagecore.storage.checks import as_float, require_int

__all__ = ["DemoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo serves, and in how little memory: the pools hold about half of what would like to run at once.

    `num_blocks` has one entry a group: layers with a window give back what it has left, and make do with fewer. With
    `swap`, preempted runs wait in a second memory of as many blocks, as far as they go, and are not computed again.
    `evict` is the policy by which cached blocks are given up; with "none", nothing is kept for reuse.

    Raises
    ------
    ShapeError
        A number that is out of its range.
    UnsupportedOption
        An unknown policy, or a `swap` or `model` of another type.
    """

    seed: int = 0
    num_requests: int = 24
    block_size: int = 16
    num_blocks: tuple[int, int] = (85, 53)
    max_running: int = 12
    max_tokens_per_step: int = 96
    max_length: int = 448
    temperature: float = 0.8
    swap: bool = False
    evict: str = POLICIES[0]
    model: ModelSizes = field(default_factory=ModelSizes)

    def __post_init__(self) -> None:
        require_int("seed", self.seed, 0)
        for name in ("num_requests", "block_size", "max_running", "max_tokens_per_step", "max_length"):
            require_int(name, getattr(self, name))
        if not isinstance(self.num_blocks, tuple) or len(self.num_blocks) != 2:
            raise ShapeError(
                f"num_blocks is {self.num_blocks!r}; give a tuple with one number for each of the 2 groups"
            )
        for blocks in self.num_blocks:
            require_int("num_blocks", blocks, 2)
        if not 0 <= as_float("temperature", self.temperature) < math.inf:
            raise ShapeError(f"temperature is {self.temperature}; it must be 0 or more, and finite")
        as_flag("swap", self.swap)
        check_policy(self.evict)
        as_instance("model", self.model, ModelSizes)
