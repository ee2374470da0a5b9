"""Content keys in plain Python: one message a block, hashed by the twin of XXH3 or by hashlib."""

import hashlib
import struct

from tests.reference.xxh3 import xxh3_128


def spans_of_block(spans, block, size):
    parts = []
    for start, end, digest in sorted(spans):
        if start < (block + 1) * size and end > block * size:
            content = digest if isinstance(digest, bytes) else digest.to_bytes(32, "little", signed=True)
            place = struct.pack("<qq", start - block * size, end - block * size)
            parts.append(place + bytes([isinstance(digest, bytes)]) + struct.pack("<I", len(content)) + content)
    return struct.pack("<I", len(parts)) + b"".join(parts)


def content_chain(digest, tokens, size, *, space=b"", spans=(), hash="xxh3_128"):
    """Return the hash of each whole block; `space` is the digest of the namespace."""
    secret = b"".join(hashlib.sha256(digest + bytes([part])).digest() for part in range(6))
    parent, chain = bytes(16), []
    for block in range(len(tokens) // size):
        message = b"pagecore" + (1).to_bytes(8, "little") + digest + parent
        message += struct.pack("<I", len(space)) + space if block == 0 else bytes(4)
        message += spans_of_block(spans, block, size)
        message += b"".join(struct.pack("<i", token) for token in tokens[block * size : (block + 1) * size])
        parent = xxh3_128(message, secret) if hash == "xxh3_128" else hashlib.sha256(message).digest()[:16]
        chain.append(parent)
    return chain
