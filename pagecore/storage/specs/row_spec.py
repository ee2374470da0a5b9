"""RowSpec: the spec of rows that a layer stores next to attention, such as compressed latents and keys of indexers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import as_tuple, require_int, shown
from pagecore.storage.specs.parallel import TensorParallel
from pagecore.storage.specs.spec import Plane


@dataclass(frozen=True)
class RowSpec:
    """Rows of numbers that a layer stores next to its keys and values: one for each token, or one for several.

    It describes compressed latents, keys of indexers, and tokens that wait to be compressed. A cache stores, shares and
    moves the rows like keys and values; `PagedKVCache.plane` returns them, and the engine writes and reads them.
    Tensor-parallel ranks each have a copy. Specs are values: compared by their fields, and hashable.

    Parameters
    ----------
    rows : tuple of Plane
        Planes per token, whose shapes are those of one row.
    tokens : int
        Number of tokens that share a row. Row ``i`` of a block belongs to its tokens from ``i * tokens`` on.
    block_size : int, optional
        Tokens of a block of the cache, a multiple of `tokens`; needed if `tokens` is above 1, because planes of rows
        are then planes per block. A cache with another block size is refused.
    window : int, optional
        Number of tokens whose rows are kept, including the newest; by default all.

    Raises
    ------
    ShapeError
        A number below 1, or a block size that is missing or not a multiple of `tokens`.
    UnsupportedOption
        No rows, or planes that are not per token.

    Examples
    --------
    >>> from pagecore import Plane, RowSpec
    >>> RowSpec((Plane("latent", (512,), "bfloat16"),), tokens=4, block_size=128).planes
    (Plane(name='latent', shape=(32, 512), dtype=DType('bfloat16'), per='block'),)
    """

    rows: tuple[Plane, ...]
    _: KW_ONLY
    tokens: int = 1
    block_size: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        rows = as_tuple("rows", self.rows, "a tuple of Plane")
        for row in rows:
            if not isinstance(row, Plane) or row.per != "token":
                raise UnsupportedOption(f"rows has {shown(row)}; expected a Plane per token, with the shape of a row")
        if not rows:
            raise UnsupportedOption("rows is empty; give a Plane for each array of rows")
        object.__setattr__(self, "rows", rows)
        tokens = require_int("tokens", self.tokens)
        object.__setattr__(self, "tokens", tokens)
        for name in ("block_size", "window"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else require_int(name, given))
        if tokens > 1 and (self.block_size is None or self.block_size % tokens):
            raise ShapeError(
                f"block_size is {self.block_size}, and a row belongs to {tokens} tokens; give the block size of the "
                f"cache, a multiple of {tokens}"
            )

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a row for each token; with `tokens`, planes per block ``[block_size / tokens, *shape]``."""
        if self.tokens == 1:
            return self.rows
        assert self.block_size is not None
        count = self.block_size // self.tokens
        return tuple(replace(row, shape=(count, *row.shape), per="block") for row in self.rows)

    def shard(self, _parallel: TensorParallel) -> RowSpec:
        """Return the spec itself: every rank has all rows."""
        return self
