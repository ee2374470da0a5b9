"""Content keys: names of blocks that are equal in every process with the same model, layout and prompt.

The hash of a block covers its tokens and everything before them (Merkle, 1979; prefix hashes as in vLLM, 2024). The
message is described in `pagecore/tiers/keys/content_chain.hpp`. A key is the hash and the number of a lane.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.index.radix._radix import validate_spans
from pagecore.storage.checks import INT32_MAX, member, shown
from pagecore.tiers.keys._keys import chain_xxh3, payload_sums
from pagecore.tiers.keys.fingerprint import SCHEMA_VERSION, Fingerprint
from pagecore.tiers.store import KEY_BYTES

__all__ = ["Span", "content_chain", "lane_keys", "namespace_digest", "payload_sum", "payload_sums"]

HASH_BYTES = KEY_BYTES - 1
MAX_DEPTH = 16
Span = tuple[int, int, bytes | int]
Chain = NDArray[np.uint8]


def content_chain(
    fingerprint: Fingerprint,
    tokens: ArrayLike,
    *,
    namespace: Hashable = None,
    spans: Iterable[Span] | None = None,
) -> Chain:
    """Return the chain hash of each whole block of a prompt.

    Parameters
    ----------
    fingerprint : Fingerprint
    tokens : array_like of int
        Token ids of int32, one-dimensional; tokens after the last whole block are ignored.
    namespace : str, bytes, int, float, bool, None, or a tuple of them
        As for `PagedKVCache.add_sequence`. A store outlives the process, so that objects without a value of their own
        are refused.
    spans : iterable of (start, end, digest), optional
        Media of the prompt, as for `PagedKVCache.add_sequence`.

    Returns
    -------
    ndarray of uint8
        ``[blocks, 16]``, new.

    Raises
    ------
    ShapeError
        Tokens or spans of an invalid shape or range.
    UnsupportedDtype
        A namespace or digest of another type.

    Examples
    --------
    >>> from pagecore import AttentionSpec, PagedKVCache
    >>> cache = PagedKVCache(AttentionSpec(2, 64), num_blocks=9, device="none")
    >>> chain = content_chain(Fingerprint.of(cache, model="example"), range(40))
    >>> chain.shape
    (2, 16)
    """
    if not isinstance(fingerprint, Fingerprint):
        raise UnsupportedOption(f"fingerprint is {shown(fingerprint)}; pass Fingerprint.of(cache, model=...)")
    ids = _token_ids(tokens)
    size = fingerprint.block_size
    digest = namespace_digest(namespace)
    space = struct.pack("<I", len(digest)) + digest
    blocks, parts = _spans_by_block(spans, size, len(ids) // size)
    header = struct.pack("<8sQ", b"pagecore", SCHEMA_VERSION) + fingerprint.digest
    if fingerprint.hash == "sha256":
        return _chain_sha256(header, space, ids, size, dict(zip(blocks, parts, strict=True)))
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    numbers = np.array(blocks, np.int64)
    return chain_xxh3(header, space, fingerprint.secret, ids, size, numbers, ends, b"".join(parts))


def lane_keys(chain: Chain, lane: int) -> Chain:
    """Return the content keys of a lane: the hashes, each followed by the number of the lane.

    Parameters
    ----------
    chain : ndarray of uint8
        ``[n, 16]``, part of a chain.
    lane : int
        Number of the group, or the number of groups for the states.

    Returns
    -------
    ndarray of uint8
        ``[n, 17]``, new.

    Raises
    ------
    ShapeError
        A chain of another shape, or a lane that does not fit a byte.
    """
    if not isinstance(chain, np.ndarray):
        raise ShapeError(f"chain is {shown(chain)}; expected an array that content_chain returned")
    if chain.ndim != 2 or chain.shape[1] != HASH_BYTES or chain.dtype != np.uint8:
        raise ShapeError(f"expected a chain of uint8 [n, {HASH_BYTES}], got {chain.dtype} {list(chain.shape)}")
    keys = np.empty((len(chain), KEY_BYTES), np.uint8)
    keys[:, :HASH_BYTES] = chain
    keys[:, HASH_BYTES] = member("lane", lane, 255, "a fingerprint")
    return keys


def payload_sum(key: bytes | Chain, address: int, nbytes: int) -> int:
    """Return the sum of one payload: XXH3_64 of its bytes, seeded by its key; see `payload_sums`.

    Parameters
    ----------
    key : bytes or ndarray of uint8
        17 bytes.
    address, nbytes : int
        The payload in memory of this process.
    """
    keys = np.frombuffer(bytes(key), np.uint8).reshape(1, -1)
    return int(payload_sums(keys, np.array([[address, nbytes]], np.uint64))[0])


def namespace_digest(namespace: Hashable) -> bytes:
    """Return SHA-256 of a namespace's value and type, 32 bytes; b"" for None, which is the absence of a namespace.

    Raises
    ------
    UnsupportedDtype
        A namespace with parts other than str, bytes, int, float, bool, None and tuples of them.
    """
    return b"" if namespace is None else hashlib.sha256(_pack_namespace(namespace, MAX_DEPTH)).digest()


def _pack_namespace(value: object, depth: int) -> bytes:
    """Return bytes that are equal iff the namespaces are equal in value and type, at every depth."""
    if value is None:
        return b"N"
    kind = type(value)
    packed: Any = value
    if kind is bool:
        return b"T" if value else b"F"
    if kind is str:
        return _sized(b"s", packed.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _sized(b"b", packed)
    if kind is int:
        return _sized(b"i", packed.to_bytes(packed.bit_length() // 8 + 1, "little", signed=True))
    if kind is float and not math.isnan(packed):
        return b"f" + struct.pack("<d", packed + 0.0)  # -0.0 equals 0.0
    if kind is tuple and depth > 0:
        parts = b"".join(_pack_namespace(part, depth - 1) for part in packed)
        return b"(" + struct.pack("<Q", len(packed)) + parts
    raise UnsupportedDtype(
        f"the namespace contains {shown(value)}, which has no value outside this process; use str, bytes, int and "
        f"tuples of them, up to {MAX_DEPTH} levels deep"
    )


def _sized(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack("<Q", len(content)) + content


def _token_ids(tokens: ArrayLike) -> NDArray[np.int32]:
    """Return tokens as a contiguous array of int32; an array of int32 is not copied."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        raise ShapeError(f"tokens is {shown(tokens)}; give a list or a one-dimensional array") from None
    if ids.ndim != 1:
        raise ShapeError(f"tokens have shape {list(ids.shape)}; give a list or a one-dimensional array")
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.dtype.kind not in "iu":
        raise UnsupportedDtype(f"tokens are {ids.dtype}; give integers")
    if ids.dtype != np.int32:
        if int(ids.max()) > INT32_MAX or int(ids.min()) < -INT32_MAX - 1:
            raise ShapeError(f"tokens reach from {ids.min()} to {ids.max()}; ids are int32")
        ids = ids.astype(np.int32)
    return np.ascontiguousarray(ids)


def _spans_by_block(spans: Iterable[Span] | None, size: int, num_blocks: int) -> tuple[list[int], list[bytes]]:
    """Return the blocks that spans reach, ascending, and the packed spans of each.

    A span is its start and end relative to the block, the kind of its digest and the digest, whose length precedes it.
    """
    found: dict[int, list[bytes]] = {}
    for start, end, digest in sorted(validate_spans(() if spans is None else spans), key=lambda span: span[0]):
        is_bytes = isinstance(digest, bytes)
        content = digest if isinstance(digest, bytes) else int(digest).to_bytes(32, "little", signed=True)
        for block in range(start // size, min(num_blocks, (end - 1) // size + 1)):
            place = (start - block * size, end - block * size, is_bytes, len(content))
            found.setdefault(block, []).append(struct.pack("<qqBI", *place) + content)
    blocks = sorted(found)
    return blocks, [struct.pack("<I", len(found[block])) + b"".join(found[block]) for block in blocks]


def _chain_sha256(
    header: bytes, space: bytes, ids: NDArray[np.int32], size: int, spans: dict[int, bytes]
) -> NDArray[np.uint8]:
    """Return the chain of SHA-256; the loop is over blocks, about 1 us each."""
    none = struct.pack("<I", 0)
    start = hashlib.sha256(header)
    parent, data, step = bytes(HASH_BYTES), ids.astype("<i4", copy=False).tobytes(), 4 * size
    chain = []
    for block in range(len(ids) // size):
        message = start.copy()
        message.update(parent + space + spans.get(block, none) + data[block * step : (block + 1) * step])
        parent, space = message.digest()[:HASH_BYTES], none
        chain.append(parent)
    return np.frombuffer(b"".join(chain), np.uint8).reshape(-1, HASH_BYTES).copy()
