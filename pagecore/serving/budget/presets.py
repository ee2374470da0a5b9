"""Presets by device memory, and the fraction of it that weights and cache may take.

Source: the defaults of SGLang's server arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int, shown

__all__ = [
    "DRAFTS",
    "LEAST_CHUNK",
    "MIB",
    "Preset",
    "chunk_bytes",
    "draft_bytes",
    "preset_for",
    "reserved_bytes",
    "static_fraction",
    "vision_factor",
]

MIB = 1 << 20
GIB = 1 << 30
# Reserve for a draft and its graphs, in MiB: of a model of its own, of layers on top of the model, of n-grams, of the
# layers for further tokens of a checkpoint, which run as EAGLE does, and of Medusa heads, which only have weights.
DRAFTS: Mapping[str, int] = {"standalone": 6 * 1024, "eagle": 2 * 1024, "ngram": 0, "mtp": 2 * 1024, "medusa": 0}
# A prefill of fewer tokens is reserved for like one of this number.
LEAST_CHUNK = 2048
_CONSTANT_MIB = 512


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of steps that suit a device.

    Attributes
    ----------
    chunked_prefill_size : int
        Tokens of prompts in a step.
    graph_batch : int
        Requests of the largest captured graph.
    """

    chunked_prefill_size: int
    graph_batch: int


# (memory below this, chunked prefill, graph batch below 4 ranks, from 4 ranks on)
_PRESETS = (
    (20 * GIB, 2048, 8, 8),
    (35 * GIB, 2048, 24, 80),
    (60 * GIB, 4096, 32, 160),
    (160 * GIB, 8192, 256, 512),
)
_LARGEST = (16384, 512, 512)


def preset_for(memory: int, ranks: int = 1) -> Preset:
    """Return the preset of a device with `memory` bytes, as one of `ranks` tensor-parallel ranks."""
    memory, ranks = require_int("memory", memory, min=0, max=None), require_int("ranks", ranks)
    chunk, few, many = next((preset[1:] for preset in _PRESETS if memory < preset[0]), _LARGEST)
    return Preset(chunk, few if ranks < 4 else many)


def chunk_bytes(chunked_prefill_size: int) -> int:
    """Return the bytes that are reserved for the activations of a prefill."""
    return max(chunked_prefill_size, LEAST_CHUNK) * 3 * MIB // 2


def reserved_bytes(
    preset: Preset, *, ranks: int = 1, stages: int = 1, data_parallel: int = 1, draft: str | None = None
) -> int:
    """Return the bytes that a device keeps free of weights and cache: activations, graphs and communication.

    Parameters
    ----------
    preset : Preset
        Sizes of the steps.
    ranks, stages : int
        Tensor-parallel ranks and pipeline stages.
    data_parallel : int
        Groups of data-parallel attention; 1 without it.
    draft : {"standalone", "eagle", "ngram", "mtp", "medusa"}, optional
        Kind of speculation.

    Raises
    ------
    ShapeError
        A number is out of range.
    UnsupportedOption
        An unknown kind of draft.
    """
    ranks, stages = require_int("ranks", ranks), require_int("stages", stages)
    groups = require_int("data_parallel", data_parallel)
    chunk = require_int("chunked_prefill_size", preset.chunked_prefill_size)
    batch = require_int("graph_batch", preset.graph_batch, min=0)
    reserved = _CONSTANT_MIB * MIB + chunk_bytes(chunk) + 2 * batch * MIB + ranks * stages * GIB // 8
    if groups > 1:
        reserved += 3 * batch * groups * MIB
    return reserved + draft_bytes(draft)


def draft_bytes(draft: str | None) -> int:
    """Return the bytes that are reserved for a kind of draft; raise UnsupportedOption for an unknown one."""
    if draft is None:
        return 0
    if not isinstance(draft, str) or draft not in DRAFTS:
        raise UnsupportedOption(f"draft is {shown(draft)}; use one of {', '.join(DRAFTS)}, or None")
    return DRAFTS[draft] * MIB


def static_fraction(
    memory: int,
    *,
    preset: Preset | None = None,
    ranks: int = 1,
    stages: int = 1,
    data_parallel: int = 1,
    draft: str | None = None,
) -> float:
    """Return the fraction of a device's memory that weights and cache may take; 0 if the reserves take all of it.

    Parameters are those of `reserved_bytes`; the preset defaults to that of the memory.

    Examples
    --------
    >>> from pagecore.serving.budget import static_fraction
    >>> static_fraction(80 << 30)
    0.8359375
    """
    chosen = preset_for(memory, ranks) if preset is None else preset
    reserved = reserved_bytes(chosen, ranks=ranks, stages=stages, data_parallel=data_parallel, draft=draft)
    return max(0, memory - reserved) / memory if memory else 0.0


def vision_factor(layers: int, hidden_size: int) -> float:
    """Return the factor of the static fraction for a model with a vision tower of this size.

    A tower of 24 layers with 1,024 features (ViT-L/14) has 0.95. The factor falls by a tenth of it for each further
    tower of this size, to 0.76 at the least, and rises to 0.9975 at the most for smaller towers.
    """
    layers, hidden_size = require_int("layers", layers), require_int("hidden_size", hidden_size)
    ratio = layers * hidden_size**2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))
