"""Pieces against a plain twin that lists every byte, sums, and streams over small socket buffers."""

import ctypes
import socket
import threading
import time

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool, ShapeError
from pagecore.tiers.handover._vectors import receive_pieces, scatter_pieces, send_pieces, sum_units
from pagecore.tiers.handover.pieces import Units, is_head_outer, token_units
from pagecore.tiers.handover.wire import batches
from tests.together import together

LAYOUTS = ["layerwise", "blockwise", "BNHD", "LCBNHD", "BLHCND", "LBHND"]


def read(pieces):
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in pieces.tolist())


def twin(pool, block, first, count, heads, *, with_heads, without_heads, head_outer):
    """The bytes of a unit, item by item."""
    out = b""
    for layer in range(pool.num_layers):
        for plane in pool.spec.planes:
            array = pool.plane(plane.name, layer).numpy().view(np.uint8)[block]
            has_heads = len(plane.shape) == 2
            if not (with_heads and len(heads) if has_heads else without_heads):
                continue
            tokens = [None] if plane.per == "block" else range(first, first + count)
            places = [(token, head) for token in tokens for head in (heads if has_heads else [None])]
            if head_outer and has_heads:
                places.sort(key=lambda place: (place[1], -1 if place[0] is None else place[0]))
            for place in places:
                out += array[tuple(index for index in place if index is not None)].tobytes()
    return out


@together("layout", LAYOUTS)
@together("head_outer", [True, False])
@together("heads", [range(4), range(1, 3), range(3, 4), range(0)])
@together("kind", [AttentionSpec(4, 8, dtype="float32"), AttentionSpec(4, 8, v_head_dim=4)])
def test_units_have_the_bytes_of_the_twin(layout, head_outer, heads, kind):
    rng = np.random.default_rng(0)
    pool = KVPool(kind, 2, 7, 8, layout="layerwise" if layout == "BLHCND" and kind.v_head_dim else layout)
    for buffer in pool.buffers:
        buffer.numpy()[:] = rng.integers(0, 256, buffer.nbytes, np.uint8)
    blocks, firsts, counts = np.array([3, 1, 5, 2]), np.array([4, 0, 0, 0]), np.array([4, 8, 8, 3])
    options = {"with_heads": True, "without_heads": True, "head_outer": head_outer}
    units = token_units(pool, blocks, firsts, counts, range(pool.num_layers), heads, **options)
    begin = 0
    for i in range(4):
        pieces = units.pieces[begin : units.ends[i]]
        assert read(pieces) == twin(pool, blocks[i], firsts[i], counts[i], heads, **options)
        begin = int(units.ends[i])
    assert begin == len(units.pieces)


def test_contiguous_memory_is_one_piece():
    pool = KVPool(AttentionSpec(4, 8), 3, 9, 16, layout="blockwise")
    options = {"with_heads": True, "without_heads": True, "head_outer": is_head_outer(pool)}
    units = token_units(
        pool, np.array([2, 5]), np.zeros(2, int), np.full(2, 16), range(pool.num_layers), range(4), **options
    )
    assert units.pieces[:, 1].tolist() == [pool.bytes_per_block] * 2
    none = token_units(pool, np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), range(0), range(4), **options)
    assert (none.nbytes, len(none.ends)) == (0, 0)


def test_sums_depend_on_bytes_and_seeds_and_not_on_pieces():
    memory = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    base = memory.ctypes.data
    whole = np.array([[base, 6000], [base + 6000, 4000]], np.uint64)
    parts = np.array([[base, 1], [base + 1, 5999], [base + 6000, 0], [base + 6000, 4000]], np.uint64)
    seeds = np.array([7, 9], np.uint64)
    one = sum_units(whole, np.array([1, 2]), seeds)
    assert (one == sum_units(parts, np.array([2, 4]), seeds)).all()
    assert (one != sum_units(whole, np.array([1, 2]), seeds[::-1].copy())).all()
    memory[5999] ^= 1
    assert (one != sum_units(whole, np.array([1, 2]), seeds)).tolist() == [True, False]
    # XXH3_64bits of no bytes, from the specification.
    empty = sum_units(np.zeros((0, 2), np.uint64), np.array([0]), np.zeros(1, np.uint64))
    assert empty.tolist() == [0x2D06800538D394C2]
    with pytest.raises(ShapeError, match="ends has 3 after 0"):
        sum_units(whole, np.array([3]), seeds[:1])
    with pytest.raises(ShapeError, match="1 seeds are given for 2 units"):
        sum_units(whole, np.array([1, 2]), seeds[:1])


def random_pieces(memory, count, rng):
    sizes = rng.multinomial(len(memory), np.full(count, 1 / count))
    starts = memory.ctypes.data + np.cumsum(sizes) - sizes
    return np.stack([starts, sizes], axis=1).astype(np.uint64)


@pytest.mark.parametrize("count", [1, 3, 600, 3000])
def test_streams_move_all_pieces_through_small_buffers(count):
    rng = np.random.default_rng(count)
    source, target = rng.integers(0, 256, 400_000, np.uint8), np.zeros(400_000, np.uint8)
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        deadline = time.monotonic_ns() + 10**10
        results = []
        sender = threading.Thread(
            target=lambda: results.append(send_pieces(one.fileno(), random_pieces(source, count, rng), deadline))
        )
        sender.start()
        pieces = random_pieces(target, 7 * count % 1000 + 1, np.random.default_rng(1))
        assert receive_pieces(other.fileno(), pieces, deadline) == (0, 400_000)
        sender.join()
    assert results == [(0, 400_000)]
    np.testing.assert_array_equal(source, target)


def test_streams_end_at_the_deadline_and_with_the_peer():
    memory = np.zeros(1000, np.uint8)
    piece = np.array([[memory.ctypes.data, 1000]], np.uint64)
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x" * 300)
        assert receive_pieces(other.fileno(), piece, time.monotonic_ns() + 10**7) == (-1, 300)
        one.close()
        assert receive_pieces(other.fileno(), piece, time.monotonic_ns() + 10**9) == (-2, 0)
        assert send_pieces(other.fileno(), piece, time.monotonic_ns() + 10**9) == (-2, 0)
    assert receive_pieces(other.fileno() if other.fileno() >= 0 else 10**6, piece, 10**18)[0] == 9  # EBADF


def test_scatter_copies_to_pieces_and_checks_the_length():
    memory = np.zeros(100, np.uint8)
    pieces = np.array([[memory.ctypes.data + 50, 10], [memory.ctypes.data, 20]], np.uint64)
    scatter_pieces(np.arange(30, dtype=np.uint8), pieces)
    assert memory[50:60].tolist() == list(range(10))
    assert memory[:20].tolist() == list(range(10, 30))
    with pytest.raises(ShapeError, match="the pieces have 30 bytes and source has 29"):
        scatter_pieces(np.zeros(29, np.uint8), pieces)


def test_batches_hold_whole_units():
    pieces = np.array([[0, 300]] * 10, np.uint64)
    ends = np.arange(1, 11)
    assert batches(ends, pieces, 700) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert batches(ends, pieces, 100) == [(i, i + 1) for i in range(10)]
    assert batches(ends, pieces, 10**6) == [(0, 10)]
    assert batches(np.zeros(0, np.int64), pieces[:0], 100) == []
    assert Units.concatenate([]).nbytes == 0
