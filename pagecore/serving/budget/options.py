"""Options of a plan of a device's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.budget.presets import Preset, draft_bytes, preset_for
from pagecore.storage import parse_memory
from pagecore.storage.checks import require_int, shown

__all__ = ["DeviceOptions"]

BYTES_MAX = 1 << 60
Config = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Weights, parallelism and steps of an engine on a device, for `plan_model`.

    Parameters
    ----------
    weights : str or int
        "auto" counts the parameters of the config, in the format of its checkpoint. A name such as "fp8" or "int4"
        counts them in another format; bytes, or a string such as "15GiB", are those of one rank.
    data_parallel : int
        Groups of data-parallel attention; divides the ranks. Each group has copies of the attention's weights, and
        keys and values of its own requests.
    pipeline_stages : int
        Stages among which the layers are divided, each with `ranks` ranks. The plan has the figures of the worst stage,
        whose cache holds the fewest requests.
    chunked_prefill_size, graph_batch : int, optional
        Tokens of prompts in a step, and requests of the largest graph; the preset of the device by default.
    static_fraction : float, optional
        Fraction of the memory for weights and cache; computed from the reserves by default.
    draft : {"standalone", "eagle", "ngram", "mtp", "medusa"}, optional
        Kind of speculation. "mtp" loads the layers for the prediction of further tokens that the checkpoint has: their
        weights, and their keys and values as layers of the same cache. "medusa" loads heads, which store nothing.
    draft_model : config, optional
        Config of the draft, or of Medusa heads; the keys and values of a draft are planned next to those of the model.
    images : int
        Images that are encoded in one step.
    image_size : int, optional
        Pixels along each side of an image; that of the config, or 1,024, by default.
    embedding_cache : int or str
        Memory for the embeddings of images that are used again.

    Raises
    ------
    ShapeError
        A number is out of range.
    UnsupportedOption
        An unknown draft, a draft model for n-grams or "mtp", or none for "medusa".
    """

    weights: int | str = "auto"
    data_parallel: int = 1
    pipeline_stages: int = 1
    chunked_prefill_size: int | None = None
    graph_batch: int | None = None
    static_fraction: float | None = None
    draft: str | None = None
    draft_model: Config | None = None
    images: int = 1
    image_size: int | None = None
    embedding_cache: int | str = "100MiB"

    def __post_init__(self) -> None:
        require_int("data_parallel", self.data_parallel)
        require_int("pipeline_stages", self.pipeline_stages)
        require_int("images", self.images, min=0)
        for name, least in (("chunked_prefill_size", 1), ("graph_batch", 0), ("image_size", 1)):
            value = getattr(self, name)
            if value is not None:
                require_int(name, value, min=least)
        fraction: object = self.static_fraction
        if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction < 1):
            raise ShapeError(f"static_fraction is {shown(fraction)}; it must be above 0 and below 1")
        draft_bytes(self.draft)
        if self.draft_model is not None and self.draft in ("ngram", "mtp"):
            raise UnsupportedOption(f"draft is {self.draft!r}, which needs no draft_model; leave draft_model out")
        if self.draft_model is None and self.draft == "medusa":
            raise UnsupportedOption("draft is 'medusa', which needs the config of the heads; pass it as draft_model")
        device_bytes("embedding_cache", self.embedding_cache)

    @property
    def counts_parameters(self) -> bool:
        """True if weights are counted from the config, not given in bytes."""
        return isinstance(self.weights, str) and not self.weights.lstrip()[:1].isdigit()

    @property
    def draft_kind(self) -> str | None:
        """Kind of draft: a `draft_model` alone is standalone."""
        return "standalone" if self.draft is None and self.draft_model is not None else self.draft

    def preset(self, memory: int, ranks: int) -> Preset:
        """Return the sizes of steps: those that are given, else those of the device's preset."""
        preset = preset_for(memory, ranks)
        chunk, batch = self.chunked_prefill_size, self.graph_batch
        return Preset(
            preset.chunked_prefill_size if chunk is None else chunk, preset.graph_batch if batch is None else batch
        )


def device_bytes(name: str, memory: object) -> int:
    """Return a number of bytes up to 1 EiB, or of a string such as "80GiB"; raise ShapeError for a fraction."""
    given: Any = memory
    if isinstance(given, float):
        raise ShapeError(f"{name} is {shown(given)}; give bytes, or a str such as '80GiB'")
    try:
        return require_int(name, parse_memory(given), min=0, max=BYTES_MAX)
    except ShapeError as error:
        raise ShapeError(str(error).replace("memory is", f"{name} is", 1)) from None
