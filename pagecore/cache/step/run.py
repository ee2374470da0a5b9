"""Write and attend of a prepared step; `Step.run` calls them while the step is in flight."""

from __future__ import annotations

from typing import Any, NoReturn

from pagecore.cache.layers.groups import Layer
from pagecore.cache.parts import CacheParts
from pagecore.cache.step.batch import Batch
from pagecore.errors import UnsupportedOption, shown

# Arguments of the operators that a batch supplies.
SUPPLIED = ("rows", "cu_query_lens", "block_table", "seq_lens")


def write_step(parts: CacheParts, layer: int, key: Any, value: Any, batch: Batch, stream: object) -> None:
    """Write the step's keys and values of a model layer; see `PagedKVCache.write`."""
    place, ops = _attended(parts, layer, "write"), parts.ops_of(layer)
    ops.write(parts.store.pool(place), place.index, key, value, batch, batch._groups[place.group], stream)


def attend_step(parts: CacheParts, layer: int, query: Any, batch: Batch, options: dict[str, Any]) -> Any:
    """Return the attention of the step's queries at a model layer; see `PagedKVCache.attend`."""
    batch._step.require_computed_here()
    if options and not options.keys().isdisjoint(SUPPLIED):
        _refuse_supplied(options)
    place, ops = _attended(parts, layer, "attend"), parts.ops_of(layer)
    if batch.tree_mask is not None and not ops.attends_to_trees:
        raise UnsupportedOption(
            f"the step has trees, which the attention of layer {layer} does not serve; verify a chain of drafts, or "
            "fork the sequence for each branch"
        )
    return ops.attend(parts.store.pool(place), place.index, query, batch, batch._groups[place.group], options)


def _refuse_supplied(options: dict[str, Any]) -> NoReturn:
    name = next(name for name in SUPPLIED if name in options)
    raise UnsupportedOption(
        f"{name} is {shown(options[name])}, but attend takes it from the batch; leave it out, or call the operator on "
        "cache.plane(name, layer) for other rows"
    )


def _attended(parts: CacheParts, layer: int, verb: str) -> Layer:
    """Return the place of a layer that attends; raise UnsupportedOption for a layer that keeps a state."""
    place = parts.layer(layer)
    if place.keeps_state:
        raise UnsupportedOption(
            f"{verb} serves layers that attend, but layer {layer} keeps a state; use a kernel of your own on "
            "cache.plane(name, layer) with batch.state_read and batch.state_write"
        )
    return place
