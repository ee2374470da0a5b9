"""Formats of stored keys and values: the dtype of the codes, and the scales that go with them.

The table is in the order of the native enum (format.hpp), from 1 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pagecore.arrays.dtypes.dtype import DType
from pagecore.errors import ShapeError, UnsupportedOption, shown


@dataclass(frozen=True)
class Format:
    """A way to store the numbers of a row in 8 or 4 bits.

    Attributes
    ----------
    name : str
    dtype : DType
        Dtype of the stored codes; uint8 if a byte holds two.
    codes_per_byte : int
        1, or 2: the number with the even index is in the low nibble.
    group : int or None
        Numbers that share a stored scale; 0 for the whole row, one scale a token and head. None if no scale is stored:
        the caller gives a factor for the layer or for each head.
    scale_dtype : DType or None
        Dtype of the stored scales. uint8 holds powers of two as biased exponents (UE8M0, 127 is 1).
    takes_factor : bool
        The caller gives a factor for the layer, or for each head, besides or instead of stored scales.
    """

    name: str
    dtype: DType
    codes_per_byte: int
    group: int | None
    scale_dtype: DType | None
    takes_factor: bool = False

    def check_dim(self, name: str, dim: int) -> None:
        """Raise ShapeError unless rows of `dim` numbers can be stored."""
        unit = self.group or self.codes_per_byte
        if dim % unit:
            why = f"{self.group} numbers share a scale" if self.group else f"a byte holds {self.codes_per_byte} numbers"
            raise ShapeError(f"{name} is {dim}; format {self.name!r} needs a multiple of {unit}, because {why}")

    def row_codes(self, dim: int) -> int:
        """Return the number of stored elements of a row of `dim` numbers."""
        return dim // self.codes_per_byte

    def row_scales(self, dim: int) -> int:
        """Return the number of stored scales of a row of `dim` numbers; 0 if no scale is stored."""
        return 0 if self.group is None else 1 if self.group == 0 else dim // self.group


def _formats() -> dict[str, Format]:
    e4m3, e5m2, int8, byte, single = (
        DType(name) for name in ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float32")
    )
    listed = (
        Format("float8_e4m3fn", e4m3, 1, None, None, True),
        Format("float8_e5m2", e5m2, 1, None, None, True),
        Format("float8_token", e4m3, 1, 0, single),
        Format("int8_token", int8, 1, 0, single),
        Format("int4_token", byte, 2, 0, single),
        Format("fp4_block16", byte, 2, 16, byte),
        Format("nvfp4", byte, 2, 16, e4m3, True),
        Format("mxfp8", e4m3, 1, 32, byte),
    )
    return {format.name: format for format in listed}


FORMATS: Mapping[str, Format] = MappingProxyType(_formats())

# "nvfp4" for readers. Writers compute the scales so that the largest number of a group becomes 6 or 4.
FOUR_OVER_SIX = "nvfp4_4over6"

# Bits of a code of the formats that quantise keys by channel, and so whole groups of tokens at once (KIVI).
SEALED_FORMATS: Mapping[str, int] = MappingProxyType({"kivi2": 2, "kivi4": 4})


def as_format(name: object, option: str = "format", others: Iterable[str] = ()) -> Format:
    """Return the format of a name; raise UnsupportedOption for any other value of the option.

    `FOUR_OVER_SIX` is the format "nvfp4". The message lists the formats, and `others` that the caller also takes.
    """
    found = FORMATS.get("nvfp4" if name == FOUR_OVER_SIX else name) if isinstance(name, str) else None
    if found is None and isinstance(name, str) and name in SEALED_FORMATS:
        raise UnsupportedOption(
            f"{option} is {name!r}, which quantises whole blocks: use AttentionSpec(format={name!r}) in a "
            f"PagedKVCache, or seal_kv for arrays of your own; writes of tokens take {', '.join(FORMATS)}"
        )
    if found is None:
        raise UnsupportedOption(
            f"{option} is {shown(name)}; use one of {', '.join([*FORMATS, FOUR_OVER_SIX, *others])}"
        )
    return found
