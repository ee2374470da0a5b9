"""StateSpec: the spec of a layer that keeps a state of fixed size for each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import as_tuple, flag, require_int, shown
from pagecore.storage.specs.checkpoint_format import (
    RECURRENT,
    check_quantised,
    checked_format,
    checkpoint_planes,
    scale_name,
)
from pagecore.storage.specs.parallel import TensorParallel
from pagecore.storage.specs.spec import Plane


@dataclass(frozen=True)
class StateSpec:
    """The planes of one recurrent layer, and the rules for its checkpoints.

    A recurrent layer (Mamba, gated delta rule, linear attention, short convolution) replaces its state at every token.
    A sequence has one entry of each plane, in a slot of a `StatePool`; a `StateTable` decides which slot. All state
    layers of a model share the slots. Specs are values: compared by their fields, and hashable.

    Parameters
    ----------
    planes : tuple of Plane
        Planes with ``per="sequence"``, such as the convolution's window and the recurrent state; several convolution
        planes are allowed. `delta_planes` and the other functions of `pagecore.storage.state_shapes` make them.
    chunk : int
        Tokens that the layer's kernel processes together in a prefill: it can keep a state after each chunk.
    interval : int
        Tokens between two checkpoints while a sequence is decoded; a multiple of `chunk`.
    in_place : bool
        True: a step overwrites the state that it reads. False: it reads one slot and writes another, so that abandoning
        it restores the state before it.
    draft_tokens : int
        Draft tokens of a speculative step, each of which keeps a state of its own until the step is committed.
    checkpoint_format : {"int8"}, optional
        Format of checkpoints in caches: int8 codes and scales instead of the numbers of the plane "temporal", in slots
        of their own; see `CheckpointPool`. Running states keep their precision. By default checkpoints are exact.
    ranks : int
        Number of ranks over which the model is split; the planes are those of one rank, as the functions of
        `pagecore.storage.state_shapes` return them for ``ranks=``. A cache takes only specs of its own number of ranks,
        and specs of the whole model with `split`.
    split : callable, optional
        Returns the planes of one of several ranks for ``split(ranks=4)``, such as
        ``functools.partial(delta_planes, 16, 32, 128, 128)``. It takes no part in comparisons.

    Raises
    ------
    ShapeError
        A number out of range, a plane without axes, an interval that is not a multiple of the chunk, or a quantised
        plane of one axis.
    UnsupportedOption
        No planes, planes of one name, a plane that is not per sequence, or an unknown format of checkpoints.
    UnsupportedDtype
        A quantised plane that is neither float32 nor bfloat16.

    Notes
    -----
    Checkpoints follow SGLang's hybrid radix cache (2025): a multiple of the chunk in a prefill, every `interval` tokens
    afterwards.

    Examples
    --------
    >>> from pagecore import Plane, StateSpec
    >>> conv = Plane("conv", (8192, 3), "bfloat16", per="sequence")
    >>> temporal = Plane("temporal", (32, 128, 128), "float32", per="sequence")
    >>> StateSpec((conv, temporal)).nbytes  # Qwen3-Next-80B
    2146304
    """

    planes: tuple[Plane, ...]
    _: KW_ONLY
    chunk: int = 64
    interval: int = 256
    in_place: bool = True
    draft_tokens: int = 0
    checkpoint_format: str | None = None
    ranks: int = 1
    split: Callable[..., tuple[Plane, ...]] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", _checked(self.planes))
        object.__setattr__(self, "chunk", require_int("chunk", self.chunk))
        object.__setattr__(self, "interval", require_int("interval", self.interval))
        object.__setattr__(self, "in_place", flag("in_place", self.in_place))
        object.__setattr__(self, "draft_tokens", require_int("draft_tokens", self.draft_tokens, min=0, max=1023))
        object.__setattr__(self, "checkpoint_format", checked_format("checkpoint_format", self.checkpoint_format))
        self._check_checkpoint()
        object.__setattr__(self, "ranks", require_int("ranks", self.ranks))
        if self.split is not None and not callable(self.split):
            raise UnsupportedOption(
                f"split is {shown(self.split)}; give a function of ranks, such as partial(short_conv_planes, 2048)"
            )
        if self.interval % self.chunk:
            below = self.interval // self.chunk * self.chunk
            lower = f"{below} or " if below else ""
            raise ShapeError(
                f"interval is {self.interval}, which is not a multiple of the chunk of {self.chunk} tokens; use "
                f"{lower}{below + self.chunk}"
            )

    @property
    def window(self) -> None:
        """None: a state summarises all tokens."""
        return

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def checkpoint_spec(self) -> StateSpec:
        """Spec of the bytes of a checkpoint: the spec itself, or its planes with int8 codes and scales."""
        if self.checkpoint_format is None:
            return self
        return replace(self, planes=checkpoint_planes(self.planes, RECURRENT), checkpoint_format=None, split=None)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of a checkpoint of one sequence."""
        return self.checkpoint_spec.nbytes

    def _check_checkpoint(self) -> None:
        """Raise an error if the format of checkpoints cannot store the planes."""
        if self.checkpoint_format is None:
            return
        names = [plane.name for plane in self.planes]
        for plane in self.planes:
            if plane.name in RECURRENT:
                check_quantised(plane)
                if scale_name(plane.name) in names:
                    raise UnsupportedOption(f"plane {scale_name(plane.name)!r} has the name of scales; rename it")

    def shard(self, parallel: TensorParallel) -> StateSpec:
        """Return one rank's part of the layer: the spec itself, or what `split` returns for a whole model.

        Raises
        ------
        UnsupportedOption
            The planes are those of another number of ranks, and cannot be split.
        ShapeError
            Heads or channels that the ranks cannot split.
        """
        if parallel.size == self.ranks:
            return self
        if self.ranks > 1 or self.split is None:
            raise UnsupportedOption(
                f"a StateSpec has the planes of one of {self.ranks} ranks, and the cache is one of {parallel.size}; "
                f"make the planes (pagecore.storage.state_shapes) and the spec with ranks={parallel.size}, or give the "
                "spec of the whole model split="
            )
        return replace(self, planes=self.split(ranks=parallel.size), ranks=parallel.size, split=None)

    def prefill_grid(self, block_size: int) -> int:
        """Return the distance in tokens of possible checkpoints in a prefill: lcm(chunk, block_size)."""
        return math.lcm(self.chunk, require_int("block_size", block_size))

    def decode_grid(self, block_size: int) -> int:
        """Return the distance in tokens of checkpoints while decoding: lcm(chunk, block_size, interval)."""
        return math.lcm(self.prefill_grid(block_size), self.interval)


def _checked(given: object) -> tuple[Plane, ...]:
    """Return planes per sequence of distinct names; raise an error for others."""
    planes: dict[str, Plane] = {}
    if isinstance(given, Plane):
        raise UnsupportedOption("planes is one Plane; give a tuple of planes, such as (conv, temporal)")
    for plane in as_tuple("planes", given, "a tuple of Plane"):  # type: ignore[arg-type]
        if not isinstance(plane, Plane):
            raise UnsupportedOption(f"planes has {shown(plane)}; expected a Plane")
        if plane.per != "sequence":
            raise UnsupportedOption(
                f"plane {plane.name!r} is per {plane.per}; a state has one entry for each sequence: use "
                "per='sequence', or an AttentionSpec for planes per token"
            )
        if not plane.shape:
            raise ShapeError(f"plane {plane.name!r} has the shape (); give at least one axis, such as (1,)")
        if plane.name in planes:
            raise UnsupportedOption(f"there are two planes named {plane.name!r}; give each plane a unique name")
        planes[plane.name] = plane
    if not planes:
        raise UnsupportedOption("planes is empty; a state layer stores at least one plane")
    return tuple(planes.values())
