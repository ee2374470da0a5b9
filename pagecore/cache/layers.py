"""Which layers share a group: its pool, block table and slot mapping."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Spec, TensorParallel
from pagecore.storage.checks import LAYERS_MAX, within
from pagecore.storage.pool import bytes_per_block


@dataclass(frozen=True)
class Alias:
    """A layer that stores nothing of its own: it reads what layer `layer` stored (cross-layer sharing)."""

    layer: int


@dataclass(frozen=True)
class Group:
    """Layers that store and look back alike.

    `spec` is that of the first of them; `num_layers` counts those that store, aliases not among them.
    """

    spec: Spec
    num_layers: int

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block in all layers of the group."""
        return bytes_per_block(self.spec, self.num_layers, block_size)


@dataclass(frozen=True)
class Layer:
    """Where a model layer's key and value are: layer `index` of the pool of `group`."""

    spec: Spec
    group: int
    index: int


Layers = Spec | Sequence[Spec | Alias]


def arrange(layers: Layers, num_layers: int | None, parallel: TensorParallel) -> tuple[list[Layer], list[Group]]:
    """Place every model layer in a group; `layers` says the whole model, what is placed is the rank's part of it.

    Layers stand in one group when their planes, window and query heads are equal; what only attention looks at
    (scale, softcap, sinks) may differ between the layers of a group. The order of groups is that of their first layers.
    """
    given = _listed(layers, num_layers)
    placed: list[Layer] = []
    keys: list[object] = []
    counts: list[int] = []
    specs: list[Spec] = []
    for position, entry in enumerate(given):
        if isinstance(entry, Alias):
            placed.append(_target(entry, position, placed))
            continue
        if not isinstance(entry, Spec):
            raise UnsupportedOption(
                f"layer {position} is {entry!r}; give a spec such as AttentionSpec, or Alias(layer)"
            )
        spec = parallel.shard(entry)
        key = (spec.planes, spec.window, getattr(spec, "num_query_heads", None))
        if key not in keys:
            keys.append(key)
            counts.append(0)
            specs.append(spec)
        group = keys.index(key)
        placed.append(Layer(spec, group, counts[group]))
        counts[group] += 1
    return placed, [Group(spec, count) for spec, count in zip(specs, counts, strict=True)]


def layer_number(layer: SupportsIndex, num_layers: int) -> int:
    """`layer` as an int, refused where there is no such model layer."""
    return _number("layer", layer, num_layers)


def group_number(group: SupportsIndex, num_groups: int) -> int:
    """`group` as an int, refused where the cache has no such group of layers."""
    return _number("group", group, num_groups)


def _number(what: str, value: SupportsIndex, count: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < count:
        raise ShapeError(f"{what} is {value!r}; the cache has {what}s 0 to {count - 1}")
    return number


def _listed(layers: Layers, num_layers: int | None) -> list[Spec | Alias]:
    if isinstance(layers, Spec):
        return [layers] * within("num_layers", 1 if num_layers is None else num_layers, most=LAYERS_MAX)
    if isinstance(layers, Alias):
        raise UnsupportedOption("layers is one Alias; an alias needs an earlier layer to share with")
    try:
        listed = list(layers)
    except TypeError:
        raise UnsupportedOption(f"layers is {layers!r}; give a spec, or a list with one a layer") from None
    if not listed:
        raise ShapeError("layers is empty; give at least one spec")
    if num_layers is not None and num_layers != len(listed):
        raise ShapeError(f"num_layers is {num_layers}, but layers lists {len(listed)}; leave num_layers out")
    return listed


def _target(alias: Alias, position: int, placed: list[Layer]) -> Layer:
    try:
        target = operator.index(alias.layer)
    except TypeError:
        raise ShapeError(f"layer {position} is Alias({alias.layer!r}); an alias names a layer by its number") from None
    if not 0 <= target < position:
        raise ShapeError(f"layer {position} is Alias({target}); it must name an earlier layer, 0 to {position - 1}")
    return placed[target]
