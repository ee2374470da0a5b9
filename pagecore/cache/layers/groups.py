"""Groups of layers that share a pool, a block table and a slot mapping."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Alias, Spec, StateSpec, TensorParallel
from pagecore.storage.checks import LAYERS_MAX, member, require_int, shown
from pagecore.storage.pools.pool import bytes_per_block
from pagecore.storage.specs.attended import AttendedKeys, attended_keys
from pagecore.storage.specs.attention_spec import sealing_of, tail_of
from pagecore.storage.specs.cross_spec import CrossSpec, is_cross
from pagecore.storage.specs.spec import check_spec, is_spec, window_of


@dataclass(frozen=True)
class Group:
    """Layers with equal planes, attended keys and number of query heads.

    Attributes
    ----------
    spec : Spec
        Spec of the first layer.
    num_layers : int
        Layers that store planes; aliases are not counted.
    is_tail : bool
        True for the newest tokens of layers with sealed blocks, which have a group of their own; `spec` is their
        `tail`. Its window limits what sequences keep, and not what queries see.
    num_unsealed : int
        Most tokens of a sequence after its sealed blocks, next to layers with such blocks; 0 otherwise. Windows keep
        the keys before the sealed end, so that other sequences can begin there.
    """

    spec: Spec
    num_layers: int
    is_tail: bool = False
    num_unsealed: int = 0

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees, including its own; None for all."""
        return window_of(self.spec)

    @property
    def attended(self) -> AttendedKeys:
        """Limits of the keys that a query sees."""
        return attended_keys(self.spec)

    @property
    def kept(self) -> AttendedKeys:
        """Limits of the keys that a sequence holds between its steps."""
        keys = self.attended
        if not keys.is_limited or self.is_tail:
            return keys
        return replace(keys, lookahead=keys.lookahead + self.num_unsealed)

    @property
    def is_cross(self) -> bool:
        """True for cross attention, whose blocks hold the tokens of an encoder."""
        return is_cross(self.spec)

    @property
    def max_cross_tokens(self) -> int | None:
        """Most encoder tokens of a sequence; None if the pool alone limits them, and without cross attention."""
        return self.spec.max_tokens if isinstance(self.spec, CrossSpec) else None

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of one block in all layers of the group."""
        return bytes_per_block(self.spec, self.num_layers, block_size)


# Group of the layers that keep a state, which have no block table.
STATES = -1


@dataclass(frozen=True)
class Layer:
    """The place of a model layer: layer `index` of the pool of `group`, or of the state pool for the group `STATES`.

    Attributes
    ----------
    spec, whole : Spec
        The rank's part of the layer, and the layer of the whole model.
    sealed_group : int or None
        For a layer with sealed blocks, their group, of which it is layer `index`, too; `group` has its newest tokens.
    """

    spec: Spec
    group: int
    index: int
    whole: Spec
    sealed_group: int | None = None

    @property
    def keeps_state(self) -> bool:
        """True for a layer of a StateSpec."""
        return self.group == STATES

    @property
    def cached_group(self) -> int:
        """The group whose blocks a prefix has: that of the sealed blocks, if the layer has any."""
        return self.group if self.sealed_group is None else self.sealed_group


Layers = Spec | Sequence[Spec | Alias]


def arrange(
    layers: Layers,
    num_layers: int | None,
    parallel: TensorParallel,
    *,
    attends: bool = False,
    keeps_states: bool = True,
) -> tuple[list[Layer], list[Group]]:
    """Place the rank's part of every model layer in a group, and check every spec by `check_spec`.

    Layers are in one group if their planes, windows, chunks, sink tokens and numbers of query heads are equal. Options
    that only attention uses (scale, softcap, sinks) may differ within a group. Layers with sealed blocks have two: one
    of the blocks, and one of the newest tokens. Groups have the order of their first layers; those of newest tokens
    follow, and those of cross attention are last. Layers of a StateSpec are in no group: they are numbered on their
    own, with the group `STATES`.

    A sequence has one number of sealed tokens, that of the largest residual, and all tails keep the tokens after them.

    Parameters
    ----------
    layers, num_layers
        Specs of the whole model, as for `PagedKVCache`.
    parallel : TensorParallel
    attends : bool
        Require that `write` and `attend` can serve the specs; see `check_spec`.
    keeps_states : bool
        False: raise UnsupportedOption for a StateSpec.
    """
    given = _listed(layers, num_layers)
    placed: list[Layer] = []
    keys: list[object] = []
    counts: list[int] = []
    specs: list[Spec] = []
    previous: tuple[object, Spec] | None = None
    num_states = 0
    for position, entry in enumerate(given):
        if isinstance(entry, Alias):
            placed.append(_target(entry, position, placed))
            continue
        if isinstance(entry, StateSpec):
            if not keeps_states:
                raise UnsupportedOption(
                    f"layer {position} is a StateSpec, which only a PagedKVCache serves; use one, or a StatePool"
                )
            placed.append(Layer(entry.shard(parallel), STATES, num_states, entry))
            num_states += 1
            continue
        if previous is None or previous[0] is not entry:
            previous = entry, _checked(entry, position, parallel, attends)
        spec = previous[1]
        most = spec.max_tokens if isinstance(spec, CrossSpec) else None
        # Planes of sealed blocks are flat: those of other dims and bits can have the same shapes.
        newest = None if sealing_of(spec) is None else (sealing_of(spec), tail_of(spec).planes)
        heads = getattr(spec, "num_query_heads", None)
        key = (tuple(spec.planes), newest, attended_keys(spec), heads, is_cross(spec), most)
        if key not in keys:
            keys.append(key)
            counts.append(0)
            specs.append(spec)
        group = keys.index(key)
        placed.append(Layer(spec, group, counts[group], entry))
        counts[group] += 1
    unsealed = _num_unsealed(specs)
    groups = [Group(spec, count, num_unsealed=unsealed) for spec, count in zip(specs, counts, strict=True)]
    return _in_order(placed, groups)


def _largest_residual(specs: list[Spec]) -> int:
    """Return the newest tokens that a commit leaves plain in all layers; 0 without layers with sealed blocks."""
    return max((sealing.residual for spec in specs if (sealing := sealing_of(spec)) is not None), default=0)


def _num_unsealed(specs: list[Spec]) -> int:
    """Return the most tokens of a sequence after its sealed blocks; 0 without layers that have any."""
    sizes = [sealing.block_size for spec in specs if (sealing := sealing_of(spec)) is not None]
    return _largest_residual(specs) + max(sizes) - 1 if sizes else 0


def _in_order(placed: list[Layer], groups: list[Group]) -> tuple[list[Layer], list[Group]]:
    """Return layers and groups: first those of all tokens, then the tails of sealed groups, then cross attention."""
    if groups and all(group.is_cross for group in groups):
        raise UnsupportedOption(
            "every layer that attends is a CrossSpec; list the decoder's own layers, such as AttentionSpec, as well"
        )
    own = [number for number, group in enumerate(groups) if not group.is_cross]
    sealed = [number for number in own if sealing_of(groups[number].spec) is not None]
    place = {STATES: STATES} | {number: at for at, number in enumerate(own)}
    tails = {number: len(own) + at for at, number in enumerate(sealed)}
    cross = [number for number, group in enumerate(groups) if group.is_cross]
    place |= {number: len(own) + len(sealed) + at for at, number in enumerate(cross)}
    moved = [
        replace(layer, group=tails[layer.group], sealed_group=place[layer.group])
        if layer.group in tails
        else replace(layer, group=place[layer.group])
        for layer in placed
    ]
    window = _largest_residual([group.spec for group in groups]) + 1
    made = [
        Group(replace(tail_of(groups[number].spec), window=window), groups[number].num_layers, is_tail=True)
        for number in sealed
    ]
    return moved, [groups[n] for n in own] + made + [groups[n] for n in cross]


def layer_number(layer: SupportsIndex, num_layers: int) -> int:
    """Return `layer` as an int; raise ShapeError if the cache does not have that model layer."""
    return member("layer", layer, num_layers, "the cache")


def group_number(group: SupportsIndex, num_groups: int) -> int:
    """Return `group` as an int; raise ShapeError if the cache does not have that group, or none at all."""
    if num_groups == 0:
        raise ShapeError(f"group is {shown(group)}, but every layer keeps a state, and the cache has no groups")
    return member("group", group, num_groups, "the cache")


def _listed(layers: Layers, num_layers: int | None) -> list[Spec | Alias]:
    if is_spec(layers):
        return [layers] * require_int("num_layers", 1 if num_layers is None else num_layers, max=LAYERS_MAX)
    if isinstance(layers, Alias):
        raise UnsupportedOption("layers is one Alias; an alias needs an earlier layer to share with")
    try:
        listed = list(layers)  # type: ignore[arg-type]  # no spec: is_spec narrows one way
    except TypeError:
        raise UnsupportedOption(f"layers is {shown(layers)}; give a spec, or a list with one spec per layer") from None
    if not listed:
        raise ShapeError("layers is empty; give at least one spec")
    if num_layers is not None and require_int("num_layers", num_layers, max=None) != len(listed):
        raise ShapeError(f"num_layers is {shown(num_layers)}, but layers lists {len(listed)}; leave num_layers out")
    return listed


def _checked(entry: Spec, position: int, parallel: TensorParallel, attends: bool) -> Spec:
    """Return the rank's part of a layer's spec; raise an error if the cache cannot serve it."""
    if not is_spec(entry):
        raise UnsupportedOption(f"layer {position} is {shown(entry)}; give a spec such as AttentionSpec, or an Alias")
    spec = parallel.shard(entry)
    check_spec(spec, f"layer {position}", attends=attends)
    return spec


def _target(alias: Alias, position: int, placed: list[Layer]) -> Layer:
    try:
        target = operator.index(alias.layer)
    except TypeError:
        target = -1
    if not 0 <= target < position:
        expected = f"an earlier layer, 0 to {position - 1}" if position else "a spec: layer 0 has no earlier layer"
        raise ShapeError(f"layer {position} is Alias({shown(alias.layer)}); expected {expected}")
    if placed[target].keeps_state:
        raise UnsupportedOption(
            f"layer {position} is Alias({target}), but layer {target} keeps a state, which layers cannot share; give a "
            "StateSpec instead"
        )
    return placed[target]
