"""The layers of a model: their specs, and their places in a `PagedKVCache` and in transformers' interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.layers.latents import caches_latents, latent_scale
from pagecore.interop.transformers.layers.layer import PagedHybridLayer, PagedLayer
from pagecore.interop.transformers.layers.specs import (
    StorageOptions,
    attention_specs,
    count_layers,
    latent_specs,
    refuse_cross_layers,
    refuse_format_of_states,
    refuse_stored,
    specs_of_model,
)
from pagecore.interop.transformers.states.layers import PagedStateLayer
from pagecore.interop.transformers.states.specs import layer_kinds, modules_of, state_specs
from pagecore.models.cache_format import with_rotations, with_value_format
from pagecore.storage import Spec
from pagecore.storage.specs.attended import attended_keys


@dataclass(frozen=True)
class ModelLayers:
    """Layers of a model by index.

    Attributes
    ----------
    count : int
        Number of layers; some may store nothing.
    attends : mapping
        Spec of each layer that stores keys and values.
    states : mapping
        Spec of each layer with a state.
    modules : mapping
        For each layer with a state, the module that updates it.
    """

    count: int
    attends: Mapping[int, Spec]
    states: Mapping[int, Spec] = field(default_factory=dict)
    modules: Mapping[int, torch.nn.Module] = field(default_factory=dict)

    @property
    def specs(self) -> list[Spec]:
        """Specs of the layers of the `PagedKVCache`: layer by layer, attention before the state."""
        return [specs[layer] for layer, specs in self._order()]

    @property
    def places(self) -> dict[int, int]:
        """Index in the `PagedKVCache` of each layer that attends."""
        return {layer: place for place, (layer, specs) in enumerate(self._order()) if specs is self.attends}

    @property
    def state_places(self) -> dict[int, int]:
        """Index in the `PagedKVCache` of each layer with a state."""
        return {layer: place for place, (layer, specs) in enumerate(self._order()) if specs is self.states}

    def _order(self) -> list[tuple[int, Mapping[int, Spec]]]:
        kinds = (self.attends, self.states)
        return [(layer, specs) for layer in range(self.count) for specs in kinds if layer in specs]

    def views(self, cache: Cache) -> list[Any]:
        """Return the layers of transformers' interface."""
        limits = {layer: _limit(spec) for layer, spec in self.attends.items()}
        views: list[Any] = []
        for layer in range(self.count):
            if layer not in self.attends:
                views.append(PagedStateLayer() if layer in self.states else _dummy())
            else:
                kind = PagedHybridLayer if layer in self.states else PagedLayer
                views.append(kind(cache, layer, limits[layer], frozenset(limits.values())))
        return views


def _limit(spec: Spec) -> int | None:
    keys = attended_keys(spec)
    return keys.window or keys.chunk


def read_layers(
    model: PreTrainedModel,
    layers: Any,
    stored: StorageOptions,
    chunk: int,
    interval: int,
    checkpoint_format: str | None = None,
) -> ModelLayers:
    """Return the layers of a model: those of its config, with the specs `layers` of the caller where given.

    `chunk`, `interval` and `checkpoint_format` are those of `StateSpec`.

    Raises
    ------
    UnsupportedOption, ShapeError
        As `PagedCache`.
    """
    format, who = stored.format, type(model).__name__
    config, dtype = model.config.get_text_config(decoder=True), str(model.dtype).removeprefix("torch.")
    kinds = layer_kinds(config)
    if layers is None:
        if kinds is None:
            layers = specs_of_model(config, dtype, format, latents=caches_latents(model))
        elif not kinds.attends:
            refuse_format_of_states(type(model).__name__, format)
            layers = []
        elif caches_latents(model):
            layers = latent_specs(config, kinds.attends.values(), dtype, format, latent_scale(model))
        else:
            layers = attention_specs(config, kinds.attends.values(), dtype, format)
        layers = with_value_format(layers, stored.value_format, who)
        layers = with_rotations(layers, stored.key_rotation, stored.value_rotation, who)
    else:
        refuse_stored(stored)
    if not isinstance(layers, list | tuple):
        raise UnsupportedOption(f"layers is a {type(layers).__name__}; expected a list with one spec for each layer")
    refuse_cross_layers(type(model).__name__, layers)
    # The last layers of Gemma 3n and Gemma 4 attend to keys that an earlier layer has stored.
    shared = getattr(config, "num_kv_shared_layers", 0)
    attending = range(count_layers(config) - shared) if kinds is None else list(kinds.attends)
    if len(layers) != len(attending):
        which = "layer of the model" + (" that stores keys" if shared else "")
        if kinds is not None:
            which = "layer of the model that attends"
        raise ShapeError(f"layers has {len(layers)} specs; expected {len(attending)}, one for each {which}")
    attends = dict(zip(attending, layers, strict=True))
    if kinds is None:
        return ModelLayers(len(attending), attends)
    modules = modules_of(model, kinds)
    return ModelLayers(kinds.count, attends, state_specs(modules, model, chunk, interval, checkpoint_format), modules)


def _dummy() -> Any:
    """Return the layer of transformers' caches that stores nothing."""
    from transformers.cache_utils import DummyLayer  # versions that lack it serve no hybrid models

    return DummyLayer()
