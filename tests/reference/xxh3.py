"""XXH3 with 128 bits and a secret, in plain Python, for inputs of 17 bytes and more (specification of Y. Collet)."""

M = (1 << 64) - 1
P32 = (None, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (None, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
SECRET_MIN = 136
STRIPE, CONSUMED = 64, 8


def u64(data, at):
    return int.from_bytes(data[at : at + 8], "little")


def avalanche(h):
    h ^= h >> 37
    h = h * 0x165667919E3779F9 & M
    return h ^ h >> 32


def folded(a, b):
    product = a * b
    return (product & M) ^ (product >> 64)


def mix16(data, at, secret, by):
    return folded(u64(data, at) ^ u64(secret, by), u64(data, at + 8) ^ u64(secret, by + 8))


def mix32(acc, data, first, second, secret, by):
    low, high = acc
    low = (low + mix16(data, first, secret, by) & M) ^ (u64(data, second) + u64(data, second + 8) & M)
    high = (high + mix16(data, second, secret, by + 16) & M) ^ (u64(data, first) + u64(data, first + 8) & M)
    return low, high


def finished(low, high, size):
    mixed = (low * P64[1] + high * P64[4] + size * P64[2]) & M
    return avalanche(low + high & M), -avalanche(mixed) & M


def short(data, secret):
    size = len(data)
    acc = size * P64[1] & M, 0
    for i in reversed(range((size - 1) // 32 + 1)):
        acc = mix32(acc, data, 16 * i, size - 16 * (i + 1), secret, 32 * i)
    return finished(*acc, size)


def middle(data, secret):
    size = len(data)
    acc = size * P64[1] & M, 0
    for i in range(4):
        acc = mix32(acc, data, 32 * i, 32 * i + 16, secret, 32 * i)
    acc = avalanche(acc[0]), avalanche(acc[1])
    for i in range(4, size // 32):
        acc = mix32(acc, data, 32 * i, 32 * i + 16, secret, 3 + 32 * (i - 4))
    acc = mix32(acc, data, size - 16, size - 32, secret, SECRET_MIN - 17 - 16)
    return finished(*acc, size)


def accumulate(acc, data, at, secret, by):
    for lane in range(8):
        value = u64(data, at + 8 * lane)
        key = value ^ u64(secret, by + 8 * lane)
        acc[lane ^ 1] = acc[lane ^ 1] + value & M
        acc[lane] = acc[lane] + (key & 0xFFFFFFFF) * (key >> 32) & M


def merged(acc, secret, by, start):
    total = start
    for i in range(4):
        total += folded(acc[2 * i] ^ u64(secret, by + 16 * i), acc[2 * i + 1] ^ u64(secret, by + 16 * i + 8))
    return avalanche(total & M)


def long(data, secret):
    size, last = len(data), len(secret) - STRIPE
    acc = [P32[3], P64[1], P64[2], P64[3], P64[4], P32[2], P64[5], P32[1]]
    in_block = last // CONSUMED
    for stripe in range((size - 1) // STRIPE):
        accumulate(acc, data, stripe * STRIPE, secret, stripe % in_block * CONSUMED)
        if stripe % in_block == in_block - 1:
            for lane in range(8):
                mixed = (acc[lane] ^ acc[lane] >> 47) ^ u64(secret, last + 8 * lane)
                acc[lane] = mixed * P32[1] & M
    accumulate(acc, data, size - STRIPE, secret, last - 7)
    return merged(acc, secret, 11, size * P64[1] & M), merged(acc, secret, last - 11, ~(size * P64[2]) & M)


def xxh3_128(data, secret):
    """Return the canonical 16 bytes of the hash."""
    assert len(data) > 16
    assert len(secret) >= SECRET_MIN
    way = short if len(data) <= 128 else middle if len(data) <= 240 else long
    low, high = way(data, secret)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")
