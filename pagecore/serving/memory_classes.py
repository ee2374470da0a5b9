"""The six classes of a device's memory, as the planner returns them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Advice", "DevicePlan", "MemoryClass"]


@dataclass(frozen=True, slots=True)
class MemoryClass:
    """One class of memory.

    Attributes
    ----------
    name : str
        "weights", "KV", "activations", "vision activations", "pixels" or "multimodal embeddings".
    nbytes : int
        Bytes on one rank.
    taken : str
        Time at which the bytes are taken, and how long they are held.
    certainty : str
        "exact", "rule" or "estimate", and the reason.
    """

    name: str
    nbytes: int
    taken: str
    certainty: str


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that frees memory.

    Attributes
    ----------
    option : str
        Field of `DeviceOptions`, or argument of `plan_model`.
    value : int, float or str
        Value to pass.
    frees : int
        Bytes that the change frees.
    suffices : bool
        True if this change, after those before it, makes everything fit.
    text : str
        The change as a sentence.
    """

    option: str
    value: int | float | str
    frees: int
    suffices: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Memory of one device of an engine.

    Attributes
    ----------
    device_memory : int
        Bytes of the device.
    ranks, data_parallel : int
        Tensor-parallel ranks, and groups of data-parallel attention.
    pipeline_stages, stage : int
        Pipeline stages, and the number from 0 of the one that the plan describes: the worst.
    layers : (int, int)
        First layer of this stage, and the one after its last.
    chunked_prefill_size, graph_batch : int
        Sizes of the steps that the reserves are computed from.
    static_fraction : float
        Fraction of the memory for weights and cache; for a model with a vision tower, the factor is applied.
    vision_factor : float
        Factor of the static fraction; 1 without a vision tower.
    parameters : int or None
        Parameters of the whole model, those of a draft of the kind "mtp" included; None for weights in bytes.
    weight_format : str or None
    classes : tuple of MemoryClass
        The six classes.
    advice : tuple of Advice
        Changes that make everything fit, in the order in which to try them; empty if it fits.
    """

    device_memory: int
    ranks: int
    data_parallel: int
    chunked_prefill_size: int
    graph_batch: int
    static_fraction: float
    vision_factor: float
    parameters: int | None
    weight_format: str | None
    pipeline_stages: int = 1
    stage: int = 0
    layers: tuple[int, int] = (0, 0)
    classes: tuple[MemoryClass, ...]
    advice: tuple[Advice, ...] = ()

    @property
    def free(self) -> int:
        """Bytes that no class takes; negative if the classes do not fit."""
        return self.device_memory - sum(each.nbytes for each in self.classes)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a class by its name."""
        return next(each.nbytes for each in self.classes if each.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        return asdict(self) | {"free": self.free}
