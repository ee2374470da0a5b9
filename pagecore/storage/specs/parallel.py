"""Tensor parallelism: the heads of a model that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.storage.specs.spec import Spec, is_spec


@dataclass(frozen=True)
class TensorParallel:
    """One of `size` ranks, over which the heads of a model are split in order.

    Parameters
    ----------
    rank : int
        This rank, 0 to ``size - 1``.
    size : int
        Number of ranks; 1 for the whole model.

    Raises
    ------
    ShapeError
        A size below 1, or a rank outside ``range(size)``.

    Notes
    -----
    A rank holds query heads together with the key-value heads that they read. With 8 query heads, 2 key-value heads and
    4 ranks, ranks 0 and 1 both hold key-value head 0; rank 0 holds query heads 0 and 1, rank 1 query heads 2 and 3.

    Heads are split as in Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", 2019. If there are fewer key-value heads than ranks, they are replicated, as serving engines do.

    Examples
    --------
    >>> from pagecore import TensorParallel
    >>> TensorParallel(rank=1, size=4).heads(32)
    range(8, 16)
    >>> [TensorParallel(rank, 4).heads(2) for rank in range(4)]
    [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", require_int("size", self.size))
        object.__setattr__(self, "rank", require_int("rank", self.rank, min=0, max=None))
        if self.rank >= self.size:
            raise ShapeError(f"rank is {shown(self.rank)}; expected 0 to size - 1, which is {shown(self.size - 1)}")

    def heads(self, num_kv_heads: int) -> range:
        """Return the model's key-value heads that this rank holds: its share, or one replicated head.

        Raises
        ------
        ShapeError
            `size` neither divides `num_kv_heads` nor is a multiple of it.
        """
        heads = require_int("num_kv_heads", num_kv_heads, max=None)
        if heads % self.size == 0:
            return self._share(heads)
        if self.size % heads == 0:
            head = self.rank // (self.size // heads)
            return range(head, head + 1)
        raise ShapeError(
            f"num_kv_heads is {shown(heads)}, which {self.size} ranks can neither split nor replicate; the number of "
            "ranks must divide it or be a multiple of it"
        )

    def query_heads(self, num_query_heads: int) -> range:
        """Return the model's query heads that this rank holds.

        Raises
        ------
        ShapeError
            `size` does not divide `num_query_heads`.
        """
        heads = require_int("num_query_heads", num_query_heads, max=None)
        if heads % self.size:
            raise ShapeError(
                f"num_query_heads is {shown(heads)}, which {self.size} ranks cannot split; the number of ranks must "
                "divide it"
            )
        return self._share(heads)

    def shard(self, spec: Spec) -> Spec:
        """Return this rank's part of a layer; `spec` describes the whole layer.

        The method ``shard(parallel)`` of the spec computes the part. With a single rank it is not called. A `StateSpec`
        may have the planes of one rank already, see `StateSpec.ranks`.

        Raises
        ------
        ShapeError
            Heads that the ranks cannot split.
        UnsupportedOption
            An object that is not a spec, a spec without the method, or a method that does not return a spec.
        """
        if not is_spec(spec):
            raise UnsupportedOption(f"spec is {shown(spec)}; expected a spec such as AttentionSpec")
        if self.size == 1:
            return spec
        kind = type(spec).__name__
        shard = getattr(spec, "shard", None)
        if not callable(shard):
            raise UnsupportedOption(
                f"a {kind} cannot be split over {self.size} ranks: give it a method shard(parallel), or use one rank"
            )
        part: object = shard(self)
        if not is_spec(part):
            raise UnsupportedOption(f"shard of {kind} returned {shown(part)}; it must return a spec, the rank's part")
        return part

    def _share(self, heads: int) -> range:
        each = heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def as_parallel(parallel: object) -> TensorParallel:
    """Return `parallel`, or a single rank for None; raise UnsupportedOption for any other object."""
    if parallel is None:
        return TensorParallel()
    if not isinstance(parallel, TensorParallel):
        raise UnsupportedOption(
            f"parallel is {shown(parallel)}; use TensorParallel(rank, size), or None for a single rank"
        )
    return parallel
