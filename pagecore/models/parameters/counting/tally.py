"""Counts of parameters, sorted by the ranks that hold them and by the weights that quantisation applies to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pagecore.errors import ShapeError
from pagecore.storage.checks import ceil_div, shown

__all__ = ["QUANTISED_KINDS", "Kind", "Matrix", "Parameters", "Split", "Tally", "check_stage"]


class Split(Enum):
    """Ranks that hold a parameter."""

    TENSOR = "each rank has its share"
    ATTENTION = "each rank of an attention group has its share"
    KEY_VALUE = "each rank of an attention group has its share of the heads, or a copy of one"
    COPY = "each rank has a copy"

    # By identity: that of Enum is a Python function, and a count hashes members thousands of times.
    __hash__ = object.__hash__


class Kind(Enum):
    """Groups of parameters that quantised checkpoints treat alike."""

    LINEAR = "matrices of layers"
    EXPERT = "matrices of experts"
    EMBEDDING = "embeddings and the output head"
    VISION = "encoders of images and audio, and their projectors"
    OTHER = "norms, biases, routers, convolutions"

    __hash__ = object.__hash__


# Kinds of parameters that quantised checkpoints store with scales.
QUANTISED_KINDS = (Kind.LINEAR, Kind.EXPERT)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``outputs x inputs`` that checkpoints may quantise.

    Attributes
    ----------
    name : str
        Name of the module in a checkpoint of transformers, such as "model.layers.3.self_attn.q_proj". Up-projections
        are counted under the name of the gate, and all experts of a layer under one name.
    inputs, outputs : int
    split : Split
    kind : Kind
        `Kind.LINEAR` or `Kind.EXPERT`.
    """

    name: str
    inputs: int
    outputs: int
    split: Split
    kind: Kind


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model, or of some of its layers.

    Attributes
    ----------
    counts : mapping of (Split, Kind) to int
    kv_heads : int
        Key-value heads of the model: ranks beyond this number hold copies of keys' and values' projections.
    matrices : mapping of Matrix to int
        Number of each matrix; their elements are in `counts`, too.
    head : int
        Parameters of an output head that is not the embedding; they are in `counts`, too.
    """

    counts: Mapping[tuple[Split, Kind], int]
    kv_heads: int = 1
    matrices: Mapping[Matrix, int] = field(default_factory=dict)
    head: int = 0

    @property
    def total(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return sum(self.counts.values())

    def of_kind(self, kind: Kind) -> int:
        """Return the parameters of one kind in the whole model."""
        return sum(count for (_, each), count in self.counts.items() if each is kind)

    def on_rank(self, ranks: int = 1, data_parallel: int = 1) -> dict[Kind, int]:
        """Return the parameters of each kind on one rank.

        Parameters
        ----------
        ranks : int
            Tensor-parallel ranks.
        data_parallel : int
            Groups of data-parallel attention; each group has a copy of the attention, split over ``ranks /
            data_parallel`` ranks.
        """
        share = self.shares(ranks, data_parallel)
        found: Counter[Kind] = Counter()
        for (split, kind), count in self.counts.items():
            found[kind] += ceil_div(count, share[split])
        return dict(found)

    def shares(self, ranks: int = 1, data_parallel: int = 1) -> dict[Split, int]:
        """Return the number of ranks that share a parameter of each split."""
        group = max(1, ranks // data_parallel)
        return {
            Split.TENSOR: ranks,
            Split.ATTENTION: group,
            Split.KEY_VALUE: min(group, self.kv_heads),
            Split.COPY: 1,
        }


def check_stage(layers: range, count: int) -> range:
    """Return the layers of a stage; raise ShapeError if they are not layers of a model of `count` layers."""
    if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise ShapeError(
            f"layers is {shown(layers)}; expected a range of one or more of the {count} layers of the model"
        )
    return layers


class Tally:
    """A counter of parameters to which the blocks of a model are added.

    Attributes
    ----------
    counts : Counter of (Split, Kind)
    matrices : Counter of Matrix
    head : int
        Parameters of an output head that is not the embedding.
    module : str
        Name of the module whose matrices are added next.
    names : mapping
        Parts of names, each between dots, by which the checkpoints of a family call other modules.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[Split, Kind]] = Counter()
        self.matrices: Counter[Matrix] = Counter()
        self.head = 0
        self.module = ""
        self.names: Mapping[str, str] = {}

    def add(self, count: int, kind: Kind = Kind.OTHER, split: Split = Split.COPY) -> None:
        """Add `count` parameters."""
        self.counts[split, kind] += count

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        split: Split = Split.TENSOR,
        kind: Kind = Kind.LINEAR,
        copies: int = 1,
        name: str = "",
    ) -> None:
        """Add `copies` matrices of ``outputs x inputs``, named `name` in the module, each with a bias if it has one."""
        self.add(copies * inputs * outputs, kind, split)
        if kind in QUANTISED_KINDS:
            self.matrices[Matrix(self._path(name), inputs, outputs, split, kind)] += copies
        if bias:
            self.add(copies * outputs, Kind.VISION if kind is Kind.VISION else Kind.OTHER)

    def _path(self, name: str) -> str:
        """Return the name of a matrix in the checkpoints of the family."""
        path = f"{self.module}.{name}." if name else f"{self.module}."
        for part, own in self.names.items():
            path = path.replace(f".{part}.", f".{own}.")
        return path[:-1]

    def norm(self, dim: int, *, bias: bool = False, copies: int = 1) -> None:
        """Add `copies` norms with a weight, and a bias if they have one."""
        self.add(copies * dim * (1 + bias))
