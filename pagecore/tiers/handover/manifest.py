"""The manifest of an export: a sequence's tokens, the planes that hold it, and the place to pull them from."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import ceil_div, shown
from pagecore.tiers.handover.codec import pack, unpack

MAGIC = b"pcHO"
VERSION = 7
_HEADER = struct.Struct("<4sH")
_SUM = struct.Struct("<I")
# Names of the planes of quantised checkpoints begin with it.
QUANTISED = "checkpoint "
# Bytes of the identifier of an export, which is also the secret that a reader must know.
ID_BYTES = 16


@dataclass(frozen=True)
class PlaneShape:
    """One plane of a layer: its name, the shape of an entry on this rank, its dtype and its unit."""

    name: str
    shape: list[int]
    dtype: str
    per: str


@dataclass(frozen=True)
class GroupShape:
    """A group of layers: its planes, the number of its layers, and the options that its bytes depend on.

    Attributes
    ----------
    limits : list
        Window, chunk, lookahead and sink tokens; None without them.
    options : dict
        Formats of the group, and for each layer its given factors and label channels, which are lists if they have an
        entry for each head of the rank.
    is_cross : bool
        The blocks hold the tokens of an encoder.
    tail : int or None
        For sealed blocks, the group of the newest tokens of the same layers.
    """

    planes: list[PlaneShape]
    layers: int
    limits: list[int | None]
    options: dict[str, Any]
    is_cross: bool
    tail: int | None = None


@dataclass(frozen=True)
class Geometry:
    """The planes of a cache, as one rank of several stores them.

    Attributes
    ----------
    layers : list
        Group and index in the group of each layer of the cache; group -1 holds the layers that keep states. Layers with
        sealed blocks have the group of their newest tokens.
    states : list
        Planes of each layer that keeps a state.
    first_layer : int or None
        For a pipeline stage, the number of its first layer among those of the model; None if the cache has them all.
    """

    block_size: int
    layers: list[list[int]]
    groups: list[GroupShape]
    states: list[list[PlaneShape]]
    rank: int
    size: int
    first_layer: int | None = None

    @property
    def is_crossed(self) -> bool:
        """True if a group is of cross attention."""
        return any(group.is_cross for group in self.groups)

    @property
    def is_sealed(self) -> bool:
        """True if a group has sealed blocks."""
        return any(group.tail is not None for group in self.groups)

    @property
    def is_placed(self) -> bool:
        """True if every layer is in a group or among those that keep states, and each group of tails has one owner."""
        counts = {-1: len(self.states)} | {number: group.layers for number, group in enumerate(self.groups)}
        plain = {number: group.layers for number, group in enumerate(self.groups) if group.tail is None}
        sealed = {group.tail: group.layers for group in self.groups if group.tail is not None}
        return (
            (self.first_layer or 0) >= 0
            and all(len(place) == 2 and 0 <= place[1] < counts.get(place[0], 0) for place in self.layers)
            and len(plain) + len(sealed) == len(self.groups)
            and all(plain.get(tail) == count for tail, count in sealed.items())
        )

    @property
    def numbers(self) -> range:
        """Numbers of the layers among those of the model."""
        first = self.first_layer or 0
        return range(first, first + len(self.layers))


@dataclass(frozen=True)
class Manifest:
    """Description of an exported sequence; a process that has it can pull the sequence until the lease ends.

    Attributes
    ----------
    export : bytes
        Identifier of the export, 16 random bytes.
    transport, address : str
        Name of the transport, and the address at which the exporter answers.
    model : str
        Name of the model and revision; empty if the exporter gave none.
    geometry : Geometry
    ids : bytes
        Known token ids, int32 in little-endian order.
    num_computed : int
        Tokens whose keys and values the exporter has.
    held : list of bytes
        For each group one bit for each block of its tokens, packed as by `numpy.packbits`: 1 if the exporter has the
        block, 0 for a hole that a window left. A group of cross attention has the written encoder tokens, and one of
        sealed blocks the sealed tokens; their tail has holes before its first token.
    has_state : bool
        The exporter has a running state.
    checkpoint : int
        Tokens before the checkpoint of the states; 0 without one.
    cross : int or None
        Encoder tokens of the sequence; 0 without an encoder's input, None if they are not known yet, and for a stage
        without cross attention.
    has_cross : bool
        The exporter has the keys and values of the encoder tokens.
    namespace, spans : bytes or None
        Digests of the namespace, with that of the encoder's input, and the spans; empty for none, None if they are
        unknown.
    lease : float
        Seconds from the export to the end of the lease.
    sealed : int
        Tokens in sealed blocks; 0 for a cache without them.
    publishable : int or None
        Tokens whose blocks the importer may publish, if the exporter publishes no more: later ones were revoked, or
        rounded. None for all.
    """

    export: bytes
    transport: str
    address: str
    model: str
    geometry: Geometry
    ids: bytes
    num_computed: int
    held: list[bytes]
    has_state: bool
    checkpoint: int
    cross: int | None
    has_cross: bool
    namespace: bytes | None
    spans: bytes | None
    lease: float
    sealed: int = 0
    publishable: int | None = None

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The known token ids: int32 ``[num_tokens]``."""
        return np.frombuffer(self.ids, "<i4").astype(np.int32)

    @property
    def rests(self) -> bool:
        """True if the state after the computed tokens is a quantised checkpoint, which the next step restores."""
        return bool(self.geometry.states) and self.num_computed > 0 and not self.has_state

    def num_tokens(self, group: int) -> int:
        """Return the tokens whose keys and values the exporter has, or had, in a group."""
        if self.geometry.groups[group].is_cross:
            return self.cross or 0 if self.has_cross else 0
        return self.num_computed if self.geometry.groups[group].tail is None else self.sealed

    def held_blocks(self, group: int) -> NDArray[np.bool_]:
        """Return whether the exporter has each block of the tokens of a group."""
        count = ceil_div(self.num_tokens(group), self.geometry.block_size)
        return np.unpackbits(np.frombuffer(self.held[group], np.uint8), count=count).astype(bool)

    def encode(self) -> bytes:
        """Return the manifest as bytes: a magic number, the version, the CRC-32 of the rest, and MessagePack."""
        packed = pack(self)
        return _HEADER.pack(MAGIC, VERSION) + _SUM.pack(zlib.crc32(packed)) + packed

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Return the manifest that `encode` turned into bytes.

        Raises
        ------
        UnsupportedOption
            Bytes that are not a manifest, or one of another version.
        ShapeError
            A manifest that is cut short or changed, or whose fields contradict each other.
        """
        if not isinstance(encoded, bytes | bytearray | memoryview):
            raise UnsupportedOption(f"the manifest is {shown(encoded)}; expected bytes, as of Manifest.encode")
        data = bytes(encoded)
        if len(data) < _HEADER.size or data[:4] != MAGIC:
            raise UnsupportedOption(
                f"{len(data)} bytes that begin with {data[:4]!r} are not a manifest; pass the bytes of Manifest.encode"
            )
        version = _HEADER.unpack_from(data)[1]
        if version != VERSION:
            raise UnsupportedOption(
                f"the manifest has version {version}; this library reads {VERSION}: use the same version of pagecore "
                "on both sides"
            )
        packed = data[_HEADER.size + _SUM.size :]
        if data[_HEADER.size : _HEADER.size + _SUM.size] != _SUM.pack(zlib.crc32(packed)):
            raise ShapeError(
                f"the manifest of {len(data)} bytes cannot be read: its checksum differs, so that it was cut short or "
                "changed on the way; pass the bytes of Manifest.encode again"
            )
        manifest = unpack(cls, packed, "manifest")
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ShapeError if fields contradict each other."""
        groups, size = self.geometry.groups, self.geometry.block_size
        known, cross = self.num_computed, self.cross or 0
        numbers = min(
            known, cross, size - 1, known - self.checkpoint, self.checkpoint, known - self.sealed, self.sealed
        )
        numbers = min(numbers, self.publishable or 0, known - (self.publishable or 0))
        is_whole = len(self.export) == ID_BYTES and len(self.ids) % 4 == 0 and len(self.held) == len(groups)
        planes = [plane.name for state in self.geometry.states for plane in state]
        is_quantised = any(name.startswith(QUANTISED) for name in planes)
        has_state = not self.rests or (is_quantised and self.checkpoint == self.num_computed)
        is_whole = is_whole and self.geometry.is_placed and (size < 1 or self.sealed % size == 0)
        is_whole = is_whole and (self.sealed == 0 or self.geometry.is_sealed)
        if numbers >= 0 and is_whole and has_state:
            lengths = [ceil_div(ceil_div(self.num_tokens(group), size), 8) for group in range(len(groups))]
            if [len(bits) for bits in self.held] == lengths:
                return
        raise ShapeError(
            f"the manifest contradicts itself: {self.num_computed} tokens in {len(groups)} groups, with marks of "
            f"{[len(bits) for bits in self.held]} bytes; export the sequence again"
        )
