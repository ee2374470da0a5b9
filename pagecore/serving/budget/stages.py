"""Pipeline stages: the layers of each, and what the first and the last have in addition."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import ShapeError
from pagecore.models import ModelConfig

__all__ = ["Stage", "divide_layers", "stages_of"]

# Layers that stay together: two attentions of a LongCat-Flash share the experts.
_TOGETHER = {"longcat_flash": 2}


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one pipeline stage.

    Attributes
    ----------
    number, count : int
        Number of the stage from 0, and of all stages.
    layers : range
        Layers of the model.
    """

    number: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding and the vision tower."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the output head, and with a draft."""
        return self.number == self.count - 1

    def __str__(self) -> str:
        """Return the stage for messages; nothing for a model in one stage."""
        if self.count == 1:
            return ""
        return f"stage {self.number + 1} of {self.count} (layers {self.layers.start} to {self.layers.stop - 1})"


def divide_layers(num_layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, as vLLM divides them.

    Layers that remain go to the last stages but one, backwards: the last stage has the output head.

    Raises
    ------
    ShapeError
        There are more stages than layers.
    """
    if stages > num_layers:
        raise ShapeError(f"pipeline_stages is {stages}, but there are {num_layers} layers to divide; use fewer stages")
    each, remaining = divmod(num_layers, stages)
    return [each + (stages - 1 - remaining <= number < stages - 1) for number in range(stages)]


def stages_of(model: ModelConfig, stages: int) -> list[Stage]:
    """Return the stages of a model."""
    together = _TOGETHER.get(model.model_type, 1)
    found: list[Stage] = []
    start = 0
    for number, count in enumerate(divide_layers(model.num_layers // together, stages)):
        found.append(Stage(number, stages, range(start, start + count * together)))
        start += count * together
    return found
