"""The fingerprint of a cache: everything that decides what the bytes of a stored block mean."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Literal

from pagecore.cache.layers.groups import Group, Layer
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import CacheParts, parts_of
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Spec
from pagecore.storage.checks import flag, require_int, shown
from pagecore.storage.pools.pool_geometry import checked_geometry
from pagecore.storage.specs.attention_spec import sealing_of
from pagecore.storage.specs.spec import Plane
from pagecore.tiers.keys._keys import SECRET_BYTES

Hash = Literal["xxh3_128", "sha256"]
HASHES = ("xxh3_128", "sha256")
# Version of the message that a content key hashes, and of the fingerprint. Another version finds nothing.
SCHEMA_VERSION = 1
# Options of a spec, apart from its planes, that decide which bytes a layer stores for given keys and values.
STORED_BY = ("format", "key_scale", "value_scale", "key_bounds", "label_channels")
# The same, described only where they are given: other fingerprints are as they were before there were such options.
ROTATIONS = ("key_rotation", "value_rotation")


@dataclass(frozen=True)
class Fingerprint:
    """Identity of stored blocks: model, layout, and a secret of the deployment.

    Two caches exchange blocks through a store iff their fingerprints are equal. `of` takes it from a cache.

    Parameters
    ----------
    model : str
        Name of the model, such as "Qwen/Qwen3-8B". Required: caches of equal shapes hold different keys and values.
    lanes : tuple of str
        Description of each lane: the groups of tokens, then the states.
    payload_bytes : tuple of int
        Bytes of an entry of each lane.
    block_size : int
        Tokens of a block.
    revision : str
        Revision of the weights, and whatever else changes keys and values, such as the quantization of the weights.
    rank, num_ranks : int
        The part of the model of which the cache has the heads.
    has_states : bool
        Whether the last lane is that of the states.
    salt : bytes
        Secret of the deployment or tenant. Without it, any client that knows the model can compute the keys of a
        prompt.
    hash : {"xxh3_128", "sha256"}
        Hash of the content keys. xxh3_128 is not collision-resistant against a client that chooses prompts; use sha256
        where tenants that share a store do not trust each other.
    first_layer : int
        For a cache that has the layers of a pipeline stage: the number of its first layer among the cache layers of the
        whole model. Stages of equal layers differ in it alone.

    Raises
    ------
    UnsupportedOption
        No model, an unknown hash, or a `has_states` that is neither True nor False.
    ShapeError
        No lanes, another number of payload bytes, a `first_layer` below 0, or a `rank` that `num_ranks` does not have.
    """

    model: str
    lanes: tuple[str, ...]
    payload_bytes: tuple[int, ...]
    block_size: int
    revision: str = ""
    rank: int = 0
    num_ranks: int = 1
    has_states: bool = False
    salt: bytes = field(default=b"", repr=False)
    hash: Hash = "xxh3_128"
    first_layer: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise UnsupportedOption(
                f"model is {shown(self.model)}; name the model, because caches of equal shapes hold different keys"
            )
        if not isinstance(self.revision, str):
            raise UnsupportedOption(f"revision is {shown(self.revision)}; give a str, such as a commit of the weights")
        if not isinstance(self.salt, bytes):
            raise UnsupportedOption(f"salt is a {type(self.salt).__name__}; give bytes")
        if not isinstance(self.hash, str) or self.hash not in HASHES:
            raise UnsupportedOption(f"hash is {shown(self.hash)}; use one of {', '.join(HASHES)}")
        # As bool and int: the digest is of JSON, which has no types of NumPy, and in which 1 is not True.
        object.__setattr__(self, "has_states", flag("has_states", self.has_states))
        for name, least in (("block_size", 1), ("first_layer", 0), ("num_ranks", 1), ("rank", 0)):
            object.__setattr__(self, name, require_int(name, getattr(self, name), least))
        if self.rank >= self.num_ranks:
            raise ShapeError(f"rank is {self.rank} of {self.num_ranks} ranks; give 0 to {self.num_ranks - 1}")
        for name in ("lanes", "payload_bytes"):
            if not isinstance(getattr(self, name), tuple):
                raise ShapeError(f"{name} is {shown(getattr(self, name))}; give a tuple with an entry for each lane")
        if any(not isinstance(lane, str) for lane in self.lanes):
            raise ShapeError(f"lanes is {shown(self.lanes)}; describe each lane by a str")
        if not self.lanes or len(self.lanes) != len(self.payload_bytes):
            raise ShapeError(
                f"there are {len(self.lanes)} lanes and {len(self.payload_bytes)} payload_bytes; give one for each, "
                "and at least one"
            )
        if len(self.lanes) > 255:
            raise ShapeError(f"there are {len(self.lanes)} lanes; a content key counts up to 255")
        sizes = [require_int("payload_bytes of a lane", size, max=None) for size in self.payload_bytes]
        object.__setattr__(self, "payload_bytes", tuple(sizes))

    @classmethod
    def of(
        cls,
        cache: PagedKVCache,
        *,
        model: str,
        revision: str = "",
        salt: bytes = b"",
        hash: Hash = "xxh3_128",
        replicas: int = 1,
        first_layer: int = 0,
    ) -> Fingerprint:
        """Return the fingerprint of a cache.

        Parameters
        ----------
        cache : PagedKVCache
        model, revision, salt, hash, first_layer
            As for the constructor.
        replicas : int
            Number of consecutive ranks that hold the same heads and exchange blocks: all ranks for a model of latents,
            and 2 for 4 key-value heads on 8 ranks. Their fingerprints are equal, also to those of other numbers of
            ranks that hold these heads. One of them should write to a store that they share (``Guard(read_only=)`` for
            the others), and each needs a folder of its own for a `DiskStore`.

        Raises
        ------
        UnsupportedOption
            An object that is not a paged cache, no model, or an unknown hash; `replicas` of a cache that has states, or
            of ranks that hold other heads.
        ShapeError
            `replicas` does not divide the number of ranks; a `first_layer` below 0.
        """
        parts = parts_of(cache)
        _check_replicas(parts, replicas)
        lanes = [_group_lane(parts, number, group, replicas) for number, group in enumerate(parts.cached_groups)]
        states = parts.checkpoint_specs
        if states:
            lanes.append(_packed({"states": [_described(spec) for spec in states]}))
        groups = [(group.spec, group.num_layers) for group in parts.cached_groups]
        # The least numbers of entries: payloads do not depend on them.
        least = [2] * len(groups), 2 if states else 0
        geometry = checked_geometry(groups, parts.block_size, states, *least, _inner_axes(parts, 0))
        return cls(
            model=model,
            lanes=tuple(lanes),
            payload_bytes=geometry.payload_bytes,
            block_size=parts.block_size,
            revision=revision,
            rank=parts.parallel.rank // replicas,
            num_ranks=parts.parallel.size // replicas,
            has_states=bool(states),
            salt=salt,
            hash=hash,
            first_layer=first_layer,
        )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of every field, the salt included: 32 bytes."""
        fields = {
            "schema": SCHEMA_VERSION,
            "model": self.model,
            "revision": self.revision,
            "block_size": self.block_size,
            "hash": self.hash,
            "lanes": self.lanes,
            "payload_bytes": self.payload_bytes,
            "rank": [self.rank, self.num_ranks],
            "states": self.has_states,
            "salt": self.salt.hex(),
        }
        if self.first_layer:
            fields["first_layer"] = self.first_layer
        return hashlib.sha256(_packed(fields).encode()).digest()

    @property
    def name(self) -> str:
        """The first 8 bytes of the digest as hexadecimal digits, for folders and prefixes."""
        return self.digest[:8].hex()

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lanes)

    @cached_property
    def secret(self) -> bytes:
        """Secret of XXH3, derived from the digest."""
        parts = range(-(-SECRET_BYTES // 32))
        return b"".join(hashlib.sha256(self.digest + bytes([part])).digest() for part in parts)[:SECRET_BYTES]


def _check_replicas(parts: CacheParts, replicas: int) -> None:
    """Raise an error unless `replicas` ranks may hold the same keys and values."""
    size = parts.parallel.size
    if size % require_int("replicas", replicas):
        raise ShapeError(f"replicas is {replicas}, which does not divide the {size} ranks of the cache")
    if replicas == 1:
        return
    if parts.state_specs:
        raise UnsupportedOption(f"replicas is {replicas}, but states are split over the ranks; leave it out")
    for number, layer in enumerate(parts.layers):
        copies = _num_copies(layer, size)
        if layer.cached_group < len(parts.cached_groups) and copies % replicas:
            raise UnsupportedOption(
                f"replicas is {replicas}, but the number of consecutive ranks that hold the same heads of layer "
                f"{number} is {copies}; use a divisor of that number, or leave it out"
            )


def _num_copies(layer: Layer, size: int) -> int:
    """Return the number of consecutive ranks that hold the same planes of a layer: all of them hold latents."""
    if tuple(layer.whole.planes) == tuple(layer.spec.planes):
        return size
    return max(1, size // getattr(layer.whole, "num_kv_heads", size))


def _group_lane(parts: CacheParts, number: int, group: Group, replicas: int) -> str:
    """Return the description of a group's lane: planes, layers, limits of its keys, and the order of the axes."""
    attended = group.attended
    queries = getattr(group.spec, "num_query_heads", None)
    members = {
        layer.index: (place, layer.spec)
        for place, layer in reversed(list(enumerate(parts.layers)))  # of layers that share planes, the first stays
        if not layer.keeps_state and layer.cached_group == number
    }
    layers = [members[index] for index in sorted(members)]
    # The model decides on the windows of its layers, but the user on their formats and rotations.
    has_choice = len(parts.cached_groups) > 1 and any(_has_choice(layer.spec) for layer in parts.layers)
    return _packed(
        {
            "layers": [_described(spec) for _, spec in layers],
            **({"places": [place for place, _ in layers]} if has_choice else {}),
            "heads": None if queries is None else queries * replicas,
            "window": [attended.window, attended.chunk, attended.lookahead, attended.sink_tokens],
            # Every store keeps blocks layer by layer and plane by plane; the inner axes are the pool's.
            "order": "BLC" + _inner_axes(parts, number),
        }
    )


def _has_choice(spec: object) -> bool:
    return any(getattr(spec, name, None) is not None for name in ("format", "value_format", *ROTATIONS))


def _inner_axes(parts: CacheParts, group: int) -> str:
    """Return the order of tokens, heads and dims in a group's pool; the default for a cache without bytes."""
    axes = parts.store.pools[group].layout.axes if parts.store.pools else "HND"
    return "".join(axis for axis in axes if axis in "NHD")


def _described(spec: Spec) -> dict[str, object]:
    """Return the planes of a layer, and the options that decide their bytes."""
    options = {name: getattr(spec, name) for name in STORED_BY if hasattr(spec, name)}
    if (value_format := getattr(spec, "value_format", None)) is not None:  # else as before there was such an option
        options["value_format"] = value_format
    options |= {name: given for name in ROTATIONS if (given := getattr(spec, name, None)) is not None}
    if (sealing := sealing_of(spec)) is not None:  # its planes are flat: other dims and bits can have the same shapes
        options["sealing"] = [*astuple(sealing), getattr(spec, "head_dim", None), getattr(spec, "v_head_dim", None)]
    return {"planes": [_plane(plane) for plane in spec.planes], **options}


def _plane(plane: Plane) -> list[object]:
    return [plane.name, list(plane.shape), str(plane.dtype), plane.per]


def _packed(value: object) -> str:
    """Return JSON that is equal for equal values in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
