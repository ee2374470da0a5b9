"""Sealing of an attention layer: its older tokens in blocks of 2 or 4 bits, the newest in a plain tail (KIVI)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecore.arrays import DType
from pagecore.arrays.dtypes.formats import SEALED_FORMATS
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.storage.specs.spec import Plane

# Values of KIVI.
RESIDUAL = 128
GROUP_SIZE = 32
# Groups are vectors of the kernels.
UNIT = 16
WORD_BITS = 32
# Windows and chunks of fewer tokens stay plain in the specs of models: the tail would hold most of their keys.
WINDOW_MIN = 2048
# Fields of a spec that only sealed formats use.
OPTIONS = ("residual", "group_size", "block_size")
# Fields that sealed formats do not serve, and what to do instead.
REFUSED = {
    "key_bounds": "leave it out",
    "label_channels": "leave it out",
}


@dataclass(frozen=True, slots=True)
class Sealing:
    """Rules by which the blocks of a layer are sealed.

    Attributes
    ----------
    key_bits, value_bits : int
        2 or 4.
    group_size : int
        Tokens of a channel of keys, and channels of a token's values, that share a scale.
    block_size : int
        Tokens of a block.
    residual : int
        Newest tokens that are never sealed by a commit.
    """

    key_bits: int
    value_bits: int
    group_size: int
    block_size: int
    residual: int

    def planes(self, heads: int, key_dim: int, value_dim: int, dtype: DType) -> tuple[Plane, ...]:
        """Return the planes per block, ``(heads, numbers)``; see `pagecore.cache.layers.sealed` for their axes."""
        size, groups = self.block_size, value_dim // self.group_size
        words = value_dim * self.value_bits // WORD_BITS
        numbers = {
            "sealed_key": size * self.key_bits // WORD_BITS * key_dim,
            "sealed_value": size * words,
            "sealed_key_scale": size // self.group_size * 2 * key_dim,
            "sealed_value_scale": size * groups * 2,
        }
        return tuple(
            Plane(name, (heads, count), dtype if name.endswith("_scale") else DType("int32"), per="block")
            for name, count in numbers.items()
        )


def is_sealed_format(name: object) -> bool:
    """Return True for the name of a format whose blocks are sealed."""
    return isinstance(name, str) and name in SEALED_FORMATS


def format_of_layer(format: str | None, window: int | None) -> str | None:
    """Return the format of a model's layer: sealed formats leave short windows and chunks, whose keys are few."""
    return None if window is not None and window < WINDOW_MIN and is_sealed_format(format) else format


def read_sealing(spec: Any) -> Sealing | None:
    """Return the sealing of an AttentionSpec; None for other formats, which refuse its options.

    Raises
    ------
    UnsupportedOption
        One side without a sealed format, an option that sealed formats do not serve, or options of sealed formats
        without one.
    ShapeError
        Dims, sizes or a lookahead that do not fit.
    """
    formats = spec.format, spec.format if spec.value_format is None else spec.value_format
    if not any(is_sealed_format(name) for name in formats):
        for name in OPTIONS:
            if getattr(spec, name) is not None:
                raise UnsupportedOption(
                    f"{name} is {shown(getattr(spec, name))}, but only the formats {', '.join(SEALED_FORMATS)} use it; "
                    "leave it out"
                )
        return None
    if not all(is_sealed_format(name) for name in formats):
        raise UnsupportedOption(
            f"keys have format {shown(formats[0])} and values {shown(formats[1])}; {', '.join(SEALED_FORMATS)} seal "
            "keys and values together: use one of them for both"
        )
    for name, remedy in REFUSED.items():
        given = getattr(spec, name)
        if given is not None and given is not False:
            raise UnsupportedOption(f"{name} is given, but format {formats[0]!r} does not serve it; {remedy}")
    group, block, residual = _sizes(spec)
    sealing = Sealing(SEALED_FORMATS[formats[0]], SEALED_FORMATS[formats[1]], group, block, residual)
    _check_dims(spec, sealing)
    if spec.lookahead > sealing.residual:
        raise ShapeError(
            f"lookahead is {spec.lookahead}, but only {sealing.residual} tokens stay plain; use a residual of at least "
            "the lookahead"
        )
    return sealing


def _sizes(spec: Any) -> tuple[int, int, int]:
    """Return the group size, block size and residual."""
    group = GROUP_SIZE if spec.group_size is None else require_int("group_size", spec.group_size)
    block = max(group, GROUP_SIZE) if spec.block_size is None else require_int("block_size", spec.block_size)
    residual = RESIDUAL if spec.residual is None else require_int("residual", spec.residual, min=0)
    return group, block, residual


def _check_dims(spec: Any, sealing: Sealing) -> None:
    group = sealing.group_size
    if group % UNIT:
        raise ShapeError(f"group_size is {group}; use a multiple of {UNIT}")
    if sealing.block_size % group:
        raise ShapeError(
            f"block_size is {sealing.block_size}, not a multiple of group_size, {group}; a block holds whole groups "
            "of keys"
        )
    if spec.head_dim % UNIT:
        raise ShapeError(f"head_dim is {spec.head_dim}; format {spec.format!r} needs a multiple of {UNIT}")
    if spec.v_head_dim % group:
        raise ShapeError(
            f"v_head_dim is {spec.v_head_dim}, not a multiple of group_size, {group}; use a group_size that divides it"
        )
