"""Sizes of a hybrid model: recurrent layers between attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.demo.model import ModelSizes
from pagecore.serving.demo.recurrent import KINDS, RecurrentSizes
from pagecore.storage import Spec, StateSpec
from pagecore.storage.checks import shown

__all__ = ["HybridSizes"]

ATTENTION, WINDOW = "attention", "window"


@dataclass(frozen=True, slots=True)
class HybridSizes(ModelSizes):
    """Sizes of a hybrid model.

    Parameters
    ----------
    kinds : tuple of {"mamba2", "delta", "attention", "window"}
        Kinds of the layers, repeated until there are `num_layers`; "window" is attention with a sliding window.
    state_heads, state_groups, key_dim, value_dim, kernel : int
        Sizes of the recurrent layers: `state_groups` heads of queries and keys serve `state_heads` heads of values.
    chunk, interval : int
        Grid of the checkpoints; see `StateSpec`.
    in_place : bool
        True: a step overwrites the states that it reads.

    Raises
    ------
    ShapeError
        A size is out of its range, or `state_groups` does not divide `state_heads`.
    UnsupportedOption
        `kinds` is not a tuple of known kinds, or no layer has attention or none is recurrent.
    """

    num_layers: int = 6
    kinds: tuple[str, ...] = ("mamba2", "delta", ATTENTION)
    state_heads: int = 4
    state_groups: int = 2
    key_dim: int = 16
    value_dim: int = 32
    kernel: int = 4
    chunk: int = 16
    interval: int = 32
    in_place: bool = True

    def __post_init__(self) -> None:
        ModelSizes.__post_init__(self)
        known = (*KINDS, ATTENTION, WINDOW)
        if not isinstance(self.kinds, tuple) or not self.kinds or not all(kind in known for kind in self.kinds):
            raise UnsupportedOption(f"kinds is {shown(self.kinds)}; expected a tuple of {', '.join(known)}")
        if not 0 < len(self.recurrent) < self.num_layers:
            raise UnsupportedOption(
                f"kinds is {shown(self.kinds)} for {self.num_layers} layers; a hybrid model has layers with attention "
                "and recurrent layers"
            )
        if self.state_heads % self.state_groups:
            raise ShapeError(
                f"state_groups is {self.state_groups}, which does not divide state_heads {self.state_heads}; use a "
                "divisor"
            )
        self.spec(next(iter(self.recurrent)))

    def layer_window(self, layer: int) -> int | None:
        """Return the number of keys that a query of this layer attends to; None for all."""
        return self.window if self._kind(layer) == WINDOW else None

    @property
    def recurrent(self) -> dict[int, RecurrentSizes]:
        """Sizes of each recurrent layer, by its number; the other layers have attention."""
        dims = (self.state_heads, self.state_groups, self.key_dim, self.value_dim, self.kernel)
        kinds = {layer: self._kind(layer) for layer in range(self.num_layers)}
        return {layer: RecurrentSizes(kind, *dims) for layer, kind in kinds.items() if kind in KINDS}

    def spec(self, layer: int) -> Spec:
        """Return the spec of one layer, for a cache of float32."""
        sizes = self.recurrent.get(layer)
        if sizes is None:
            return ModelSizes.spec(self, layer)
        return StateSpec(sizes.planes(), chunk=self.chunk, interval=self.interval, in_place=self.in_place)

    def _kind(self, layer: int) -> str:
        return self.kinds[layer % len(self.kinds)]
