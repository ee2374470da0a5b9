"""StateSpec: the spec of a layer that keeps a state of fixed size for each sequence."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import as_tuple, flag, require_int, shown
from pagecore.storage.parallel import TensorParallel
from pagecore.storage.spec import Plane


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
    ranks : int
        Number of ranks over which the model is split; the planes are those of one rank, as the functions of
        `pagecore.storage.state_shapes` return them for ``ranks=``. A cache takes only specs of its own number of ranks.

    Raises
    ------
    ShapeError
        A number out of range, a plane without axes, or an interval that is not a multiple of the chunk.
    UnsupportedOption
        No planes, planes of one name, or a plane that is not per sequence.

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
    ranks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", _checked(self.planes))
        object.__setattr__(self, "chunk", require_int("chunk", self.chunk))
        object.__setattr__(self, "interval", require_int("interval", self.interval))
        object.__setattr__(self, "in_place", flag("in_place", self.in_place))
        object.__setattr__(self, "draft_tokens", require_int("draft_tokens", self.draft_tokens, min=0, max=1023))
        object.__setattr__(self, "ranks", require_int("ranks", self.ranks))
        if self.interval % self.chunk:
            below = self.interval // self.chunk * self.chunk
            raise ShapeError(
                f"interval is {self.interval}, which is not a multiple of the chunk of {self.chunk} tokens; use "
                f"{max(below, self.chunk)} or {below + self.chunk}"
            )

    @property
    def window(self) -> None:
        """None: a state summarises all tokens."""
        return

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(plane.nbytes for plane in self.planes)

    def shard(self, parallel: TensorParallel) -> StateSpec:
        """Return the spec itself, whose planes are those of one rank.

        Raises
        ------
        UnsupportedOption
            The planes are those of another number of ranks.
        """
        if parallel.size != self.ranks:
            raise UnsupportedOption(
                f"a StateSpec has the planes of one of {self.ranks} ranks, and the cache is one of {parallel.size}; "
                f"make the planes (pagecore.storage.state_shapes) and the spec with ranks={parallel.size}"
            )
        return self

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
