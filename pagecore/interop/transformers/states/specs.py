"""Layers of a hybrid model that keep a state, and the planes of their states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from pagecore.arrays import DType
from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.inputs.arguments import CACHES
from pagecore.interop.transformers.states.layers import SERVED
from pagecore.interop.transformers.states.mixers import MASKS, recurrent_modules
from pagecore.storage import Plane, StateSpec

# Models whose states are not in the layers of transformers' caches, and where they are.
_OUTSIDE = {
    "minimax": "states that its own cache class holds",
    "recurrent_gemma": "states that its modules hold",
    "xlstm": "states that its own cache class holds",
}
# Names of the planes of a state: the window of the convolution, and the recurrent state.
PLANES = ("conv", "temporal")
# Models whose scan always begins without a state.
SCANS_WITHOUT_STATE = {"jamba", "zamba", "mamba", "falcon_mamba"}


@dataclass(frozen=True)
class LayerKinds:
    """Layers of a model by what they store; a layer of Falcon-H1 is in both lists.

    Attributes
    ----------
    count : int
        Number of layers; some may store nothing.
    attends : dict
        Window of each layer that stores keys and values, or None.
    recurrent : list of int
        Layers with a state.
    """

    count: int
    attends: dict[int, int | None]
    recurrent: list[int]


def layer_kinds(config: Any) -> LayerKinds | None:
    """Return the layers of a hybrid model, as transformers' own cache has them; None for a model without states.

    Parameters
    ----------
    config : PretrainedConfig
        Config of the text model.

    Raises
    ------
    UnsupportedOption
        The states are outside of transformers' caches (MiniMax, RecurrentGemma, xLSTM) or do not begin with zeros (ZAYA
        with biases), a layer has several of them, or one that attends selects its keys with an indexer.
    """
    if config.model_type in _OUTSIDE:
        raise UnsupportedOption(
            f"the {config.model_type} has recurrent layers with {_OUTSIDE[config.model_type]}, which a PagedCache "
            "cannot serve: use transformers' cache for it"
        )
    if config.model_type == "zaya" and config.attention_bias:
        raise UnsupportedOption(
            "the zaya has attention_bias = True, so a text begins with biases as its state, and a PagedCache begins "
            "with zeros; use another cache"
        )
    if not SERVED:
        return None
    try:
        layers = DynamicCache(config=config).layers
    except KeyError:  # a kind of layer that transformers' own cache does not have
        return None
    recurrent = [index for index, layer in enumerate(layers) if hasattr(layer, "recurrent_states")]
    if not recurrent:
        return None
    attends = {
        index: getattr(layer, "sliding_window", None)
        for index, layer in enumerate(layers)
        if isinstance(layer, CacheLayerMixin)
    }
    for index in recurrent:
        if layers[index].number_of_states != 1:
            raise UnsupportedOption(
                f"layer {index} of the {config.model_type} has {layers[index].number_of_states} states; a PagedCache "
                "serves one a layer: use another cache"
            )
    indexed = [index for index, layer in enumerate(layers) if hasattr(layer, "indexer_keys")]
    if indexed:
        raise UnsupportedOption(
            f"layer {indexed[0]} of the {config.model_type} selects keys with an indexer, whose keys a PagedCache does "
            "not store; use another cache"
        )
    return LayerKinds(len(layers), attends, recurrent)


@torch.no_grad()  # type: ignore[untyped-decorator]
def state_specs(
    modules: Mapping[int, torch.nn.Module],
    model: PreTrainedModel,
    chunk: int,
    interval: int,
    checkpoint_format: str | None = None,
) -> dict[int, StateSpec]:
    """Return the spec of each recurrent layer, whose module computes one column to show its states.

    Planes have the shapes and dtypes of the model's own states: the window of the convolution is ``[dim, kernel]``, and
    the state of a gated delta rule ``[heads, key_dim, value_dim]``.
    """
    config = model.config.get_text_config(decoder=True)
    cache, specs = DynamicCache(config=config), {}
    for layer, module in modules.items():
        names = inspect.signature(type(module).forward).parameters
        name = next(name for name in CACHES if name in names)
        column = torch.zeros(1, 1, config.hidden_size, dtype=model.dtype, device=next(module.parameters()).device)
        module(column, **{name: cache})
        states = cache.layers[layer].conv_states[0], cache.layers[layer].recurrent_states[0]
        planes = tuple(
            Plane(plane, tuple(state.shape[1:]), DType(str(state.dtype).removeprefix("torch.")), per="sequence")
            for plane, state in zip(PLANES, states, strict=True)
            if state is not None
        )
        specs[layer] = StateSpec(planes, chunk=chunk, interval=interval, checkpoint_format=checkpoint_format)
    return specs


def modules_of(model: PreTrainedModel, kinds: LayerKinds) -> Mapping[int, torch.nn.Module]:
    """Return the module of each recurrent layer.

    Raises
    ------
    UnsupportedOption
        A layer has no such module, as in code that is not part of transformers.
    """
    modules = recurrent_modules(model)
    for layer, module in modules.items():
        names = inspect.signature(type(module).forward).parameters
        if "hidden_states" not in names or not all(set(each) & set(names) for each in (CACHES, MASKS)):
            raise UnsupportedOption(
                f"the {type(module).__name__} of layer {layer} takes {', '.join(list(names)[1:])}; a PagedCache serves "
                f"recurrent layers that take hidden_states, {' or '.join(MASKS)}, and {' or '.join(CACHES)}: use "
                "another cache"
            )
    if sorted(modules) != kinds.recurrent:
        missing = sorted(set(kinds.recurrent) ^ set(modules))
        raise UnsupportedOption(
            f"layer {missing[0]} of the {type(model).__name__} has a state, but not one module with layer_idx and "
            "conv_kernel_size that updates it; use another cache"
        )
    return modules
