"""What a layer stores: its planes, and what a spec is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pagecore.arrays import DType, as_dtype
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import at_least

CACHE_DTYPES = ("float32", "float16", "bfloat16")
Per = Literal["token", "block", "sequence"]


@dataclass(frozen=True)
class Plane:
    """One array that a spec stores.

    Parameters
    ----------
    name : str
        "key", "value", "latent", "scale" ...
    shape : tuple of int
        What one token (or block, or sequence) holds; ``(heads, dim)`` for a key.
    dtype : str or anything that names a dtype
    per : {"token", "block", "sequence"}
        What there is one of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    per: Per = "token"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(at_least(f"a side of plane {self.name!r}", n) for n in self.shape))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        if self.per not in ("token", "block", "sequence"):
            raise UnsupportedOption(f"plane {self.name!r} is per {self.per!r}; use 'token', 'block' or 'sequence'")

    @property
    def nbytes(self) -> int:
        """Bytes of one entry: of one token for a plane that is per token."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Spec(Protocol):
    """What pools, layouts and the cache need to know of a layer.

    Two methods more serve what not every cache asks for: ``shard(parallel) -> Spec``, a rank's part of the layer, and
    ``with_dtype(dtype) -> Spec``, the same layer stored as another dtype. A spec that lacks one is refused by name
    where it is needed.
    """

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays that the layer stores."""

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included; None for all."""
