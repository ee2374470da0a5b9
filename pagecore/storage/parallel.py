"""Tensor parallelism: which heads of a model a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.storage.spec import Spec, is_spec


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a model whose heads are shared out over `size` ranks, in order.

    Parameters
    ----------
    rank : int
        Which rank this is, 0 to ``size - 1``.
    size : int
        How many ranks share the model; 1 holds it whole.

    Query heads stand with the key-value head that they read: with 8 query heads, 2 key-value heads and 4 ranks, ranks 0
    and 1 both hold key-value head 0, rank 0 query heads 0 and 1, rank 1 query heads 2 and 3.

    Notes
    -----
    Heads are shared out as in Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
    Model Parallelism", 2019; key-value heads that are fewer than the ranks are copied, as serving engines do.

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
        """The model's key-value heads that this rank holds: its share, or one head where ranks hold copies.

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
            f"num_kv_heads is {shown(heads)}, which {self.size} ranks can neither share out nor hold one copy each of; "
            "the number of ranks must divide it or be a multiple of it"
        )

    def query_heads(self, num_query_heads: int) -> range:
        """The model's query heads that this rank holds.

        Raises
        ------
        ShapeError
            `size` does not divide `num_query_heads`.
        """
        heads = require_int("num_query_heads", num_query_heads, max=None)
        if heads % self.size:
            raise ShapeError(
                f"num_query_heads is {shown(heads)}, which {self.size} ranks cannot share out; their number must "
                "divide it"
            )
        return self._share(heads)

    def shard(self, spec: Spec) -> Spec:
        """What this rank stores and attends of a layer; `spec` is the whole model's.

        A spec says by its method ``shard(parallel)`` what a rank has of it. One rank alone takes any spec as it is.

        Raises
        ------
        ShapeError
            Heads that the ranks cannot share out.
        UnsupportedOption
            `spec` is none, or has no such method, or its method gives no spec.
        """
        if not is_spec(spec):
            raise UnsupportedOption(f"spec is {shown(spec)}; expected a spec such as AttentionSpec")
        if self.size == 1:
            return spec
        kind = type(spec).__name__
        shard = getattr(spec, "shard", None)
        if not callable(shard):
            raise UnsupportedOption(
                f"a {kind} cannot be shared out over {self.size} ranks: give it a method shard(parallel), or use one"
            )
        part: object = shard(self)
        if not is_spec(part):
            raise UnsupportedOption(f"shard of {kind} gave {shown(part)}; it must give a spec, the rank's part")
        return part

    def _share(self, heads: int) -> range:
        each = heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def as_parallel(parallel: object) -> TensorParallel:
    """`parallel` where it is a TensorParallel, the only rank there is where it is None."""
    if parallel is None:
        return TensorParallel()
    if not isinstance(parallel, TensorParallel):
        raise UnsupportedOption(f"parallel is {shown(parallel)}; give TensorParallel(rank, size), or None for one rank")
    return parallel
