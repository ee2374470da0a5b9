"""The layers of a model, as described by its config."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.models.layers.sharing import specs_of_layers
from pagecore.storage import Alias, AttentionSpec, LatentSpec, RowSpec, StateSpec

__all__ = ["ModelConfig", "ModelSpec"]

ModelSpec = AttentionSpec | LatentSpec | RowSpec | StateSpec | Alias


@dataclass(frozen=True)
class ModelConfig:
    """The cache of a model, as described by its config.

    Attributes
    ----------
    model_type : str
        The model family; for a multimodal model that of its text model.
    layers : tuple of AttentionSpec, CrossSpec, LatentSpec, RowSpec, StateSpec or Alias
        Specs in the order of the model's layers, as a cache takes them. A layer with attention and a state has two, the
        attention first; rows next to attention have specs between them; a layer that stores nothing has none, and one
        that reads the keys and values of an earlier layer has an `Alias`. Of a model with an encoder: the decoder's own
        layers, then a `CrossSpec` for the cross attention of each.
    max_length : int or None
        Maximum sequence length in tokens (`max_position_embeddings`); None if the config does not have it.
    specs_by_layer : tuple of tuple of int
        Numbers in `layers` of the specs of each model layer: ``(n,)`` in most models, ``(n, n + 1)`` in Falcon-H1,
        ``(n, num_layers + n)`` with an encoder, and ``()`` for an MLP of Nemotron-H. They are the layer numbers of a
        cache that is made with `layers`. By default each spec is a layer of its own.
    """

    model_type: str
    layers: tuple[ModelSpec, ...]
    max_length: int | None
    specs_by_layer: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.specs_by_layer:
            object.__setattr__(self, "specs_by_layer", tuple((number,) for number in range(len(self.layers))))

    @property
    def num_layers(self) -> int:
        """Number of model layers."""
        return len(self.specs_by_layer)

    def specs_of_stage(self, layers: range) -> tuple[ModelSpec, ...]:
        """Return the specs of model layers that form a pipeline stage, as a cache of the stage takes them.

        Raises
        ------
        UnsupportedOption
            A layer reads the keys and values of one in another stage.
        """
        return specs_of_layers(self.layers, [number for layer in layers for number in self.specs_by_layer[layer]])
