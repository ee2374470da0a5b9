"""Host pools in two processes: zero copies, writes that both see, and refusals without a leaked descriptor."""

import array
import gc
import os
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from pagecore import AttentionSpec, KVLayout, PagedKVCache, Plane, StateSpec
from pagecore.errors import PeerError, ShapeError, UnsupportedOption
from pagecore.storage import HostMemory, HostPool, KVPool
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.engine import export_pool, open_pool
from pagecore.tiers.engine.geometry import packed
from pagecore.tiers.engine.share import HEADER, KIND, MAGIC

GROUPS = [(AttentionSpec(2, 8, 12, "float16"), 3), (AttentionSpec(1, 16, dtype="float32", window=8), 2)]
STATES = [StateSpec(delta_planes(2, 4, 8, 8))] * 2
SIZE = 4
# Adds one to every byte of the entries, and says what it sees.
CHILD = """
import socket, sys
from pagecore.tiers.engine import open_pool
connection = socket.socket(fileno=int(sys.argv[1]))
pool = open_pool(connection)
connection.sendall(bytes([int(pool.entries(0).numpy()[5, 0])]))
for lane in range(pool.num_lanes):
    pool.entries(lane).numpy()[1:] += 1
pool.kv_pools[0].value(2)[4] = 3.0
pool.state_pool.zero([2])
connection.sendall(b"written")
connection.recv(1)
connection.sendall(bytes([int(pool.entries(1).numpy()[3, 7])]))
"""


def make(**options):
    return HostPool(GROUPS, SIZE, STATES, **{"num_blocks": [6, 5], "num_states": 4, "shared": True} | options)


@pytest.fixture
def pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(5)
    other.settimeout(5)
    with one, other:
        yield one, other


@pytest.fixture(autouse=True)
def descriptors():
    before = set(os.listdir("/proc/self/fd"))
    yield
    limit = time.monotonic() + 20
    while left := set(os.listdir("/proc/self/fd")) - before:  # threads of transports of earlier tests open some, too
        gc.collect()
        assert time.monotonic() < limit, [os.path.realpath(f"/proc/self/fd/{each}") for each in left]


def exchanged(pair, pool, **options):
    export_pool(pool, pair[0])
    return open_pool(pair[1], **options)


@pytest.mark.slow
def test_two_processes_see_each_other_s_writes(pair):
    pool = make()
    random = np.random.default_rng(0)
    before = []
    for lane in range(3):
        entries = pool.entries(lane).numpy()
        entries[...] = random.integers(0, 200, entries.shape, np.uint8)
        before.append(entries.copy())
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(pair[1].fileno())], pass_fds=[pair[1].fileno()])
    try:
        pair[1].close()
        pair[0].settimeout(60)
        export_pool(pool, pair[0])
        assert pair[0].recv(1)[0] == before[0][5, 0]
        assert pair[0].recv(7, socket.MSG_WAITALL) == b"written"
        expected = [entries.copy() for entries in before]
        for entries in expected:
            entries[1:] += 1
        assert (pool.kv_pools[0].value(2).numpy()[4] == 3).all()
        assert not any(plane.numpy()[2].any() for plane in pool.state_pool.planes())
        np.testing.assert_array_equal(pool.entries(1).numpy(), expected[1])
        others = [1, 2, 3, 5]
        np.testing.assert_array_equal(pool.entries(0).numpy()[others], expected[0][others])
        np.testing.assert_array_equal(pool.entries(2).numpy()[[1, 3]], expected[2][[1, 3]])
        pool.entries(1).numpy()[3, 7] = 201
        pair[0].sendall(b"?")
        assert pair[0].recv(1)[0] == 201
    finally:
        pair[0].close()
        assert child.wait(30) == 0


def test_an_opened_pool_has_its_own_mapping_of_the_same_memory(pair):
    pool = make(heads="NHD")
    opened = exchanged(pair, pool)
    assert opened.memory.address != pool.memory.address
    assert (opened.slot_bytes, opened.payload_bytes, opened.counts) == (
        pool.slot_bytes,
        pool.payload_bytes,
        pool.counts,
    )
    pool.kv_pools[1].key(1)[4] = 2.5
    assert float(opened.kv_pools[1].key(1)[4, 3, 0, 15].item()) == 2.5
    assert isinstance(opened.kv_pools[1], KVPool)
    assert opened.kv_pools[1].layout.heads == "NHD"
    view = opened.kv_pools[0].key(0)
    pool.close()
    opened.close()
    del pool, opened
    gc.collect()
    view[1] = 1.0
    del view


def test_a_cache_and_its_host_pool_can_be_given_shared_memory(pair):
    spec = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
    pool = HostPool([(spec, 1)], SIZE, num_blocks=[9], shared=True)
    opened = exchanged(pair, pool, groups=[(spec, 1)], block_size=SIZE)
    layout = KVLayout("blockwise", block_alignment=4096)
    cache = PagedKVCache(spec, block_size=SIZE, layout=layout, buffers=opened.kv_pools[0].buffers)
    sequence = cache.add_sequence(range(6))
    batch = cache.prepare([sequence], 6)
    keys = np.random.default_rng(0).normal(size=(6, 2, 8)).astype(np.float32)
    cache.write(0, keys, keys, batch)
    written = pool.kv_pools[0].key(0).numpy()[cache._parts.tables.blocks(sequence.row)].reshape(-1, 2, 8)
    np.testing.assert_array_equal(written[:6], keys)


@pytest.mark.parametrize("kind", [list, iter])
def test_expected_specs_are_those_of_the_result(pair, kind):
    pool = make()
    opened = exchanged(pair, pool, groups=kind(GROUPS), state_specs=kind(STATES), block_size=SIZE)
    assert opened.kv_pools[1].spec is GROUPS[1][0]
    assert opened.state_pool.specs == tuple(STATES)
    again = exchanged(pair, opened)  # an opened pool can be passed on
    again.entries(0).numpy()[1] = 9
    assert (pool.entries(0).numpy()[1] == 9).all()


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ({"groups": [GROUPS[0], (GROUPS[1][0], 1)]}, "has groups"),
        ({"groups": GROUPS[::-1]}, "has groups"),
        ({"groups": GROUPS[:1]}, "has 2 groups; expected 1"),
        ({"groups": [(AttentionSpec(2, 8, 12, "bfloat16"), 3), GROUPS[1]]}, "has groups"),
        ({"block_size": 8}, "has block_size 4; expected 8"),
        ({"state_specs": STATES[:1]}, "has states"),
        ({"state_specs": [StateSpec((Plane("s", (4,), "int8", per="sequence"),))] * 2}, "has states"),
    ],
)
def test_a_pool_of_another_geometry_is_refused(pair, expected, says):
    with pytest.raises(ShapeError, match=says):
        exchanged(pair, make(), **expected)


def test_only_host_pools_in_shared_memory_are_exported(pair):
    closed = make()
    closed.close()
    for pool, says in [
        (make(shared=False), "make it with shared=True"),
        (make(shared=False, device="none"), "not in shared memory"),
        (closed, "or closed"),
        (KVPool(GROUPS[0][0], 1, 3, SIZE), "expected a HostPool"),
        (None, "expected a HostPool"),
    ]:
        with pytest.raises(UnsupportedOption, match=says):
            export_pool(pool, pair[0])
    pair[1].settimeout(0)
    with pytest.raises(BlockingIOError):  # nothing was sent
        pair[1].recv(1)


def test_a_peer_that_closed_its_end_is_an_error(pair):
    pair[1].close()
    with pytest.raises(PeerError, match="closed the connection"):
        export_pool(make(), pair[0])
    with pytest.raises(PeerError, match="closed the connection after 0 of 12 bytes"):
        open_pool(pair[0])
    assert isinstance(PeerError("x"), ConnectionError)


def test_a_peer_that_sends_nothing_is_an_error_after_the_timeout(pair):
    with pytest.raises(PeerError, match=r"did not answer within 0.01 seconds"):
        open_pool(pair[0], timeout=0.01)
    assert pair[0].gettimeout() == 5


def send(connection, message, fds=(), header=None):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    data = (HEADER.pack(MAGIC, len(message)) if header is None else header) + message
    connection.sendmsg([data], rights)
    connection.shutdown(socket.SHUT_WR)


VALID = {
    "nbytes": 65536, "groups": [{"planes": [["key", [1, 8], "float32", "token"]], "num_layers": 1}], "block_size": 4,
    "num_blocks": [3], "states": [], "num_states": 0, "heads": "HND",
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "closed the connection|expected a message"),
        (b"{", "expected a message of a host pool"),
        (b"[]", "expected a message of a host pool"),
        (b"\xff\xfe", "expected a message of a host pool"),
        (packed("CUDA pool", VALID), "got a 'CUDA pool'"),
        (packed(KIND, VALID | {"version": 9}), "of version 9"),
        (packed(KIND, VALID | {"heads": "DNH"}), "describes a pool that is not valid"),
        (packed(KIND, VALID | {"num_blocks": [1]}), "not valid"),
        (packed(KIND, VALID | {"block_size": "4"}), "not valid"),
        (packed(KIND, VALID | {"groups": [{}]}), "not valid"),
        (packed(KIND, {}), "not valid"),
    ],
)
def test_a_message_that_is_not_a_pool_is_refused_and_its_descriptors_are_closed(pair, message, says):
    memory = HostMemory(65536, shared=True)
    send(pair[0], message, [memory.fd, memory.fd])
    with pytest.raises(PeerError, match=says):
        open_pool(pair[1])


@pytest.mark.parametrize("header", [b"GET / HTTP/1.1\r\n", struct.pack("<8sI", MAGIC, 1 << 31), MAGIC])
def test_bytes_of_another_protocol_are_refused(pair, header):
    send(pair[0], b"", header=header)
    with pytest.raises(PeerError, match=r"expected the export of a pool|closed the connection"):
        open_pool(pair[1])


def test_descriptors_are_checked(pair, tmp_path):
    memory = HostMemory(65536, shared=True)
    path = tmp_path / "file"
    path.write_bytes(bytes(65536))
    cases = [
        ([], VALID, PeerError, "sent 0 descriptors"),
        ([memory.fd] * 2, VALID, PeerError, "sent 2 descriptors"),
        ([memory.fd], VALID | {"nbytes": 8192}, ShapeError, "has 65,536 bytes; expected 8,192"),
        ([memory.fd], VALID | {"nbytes": None}, ShapeError, "nbytes"),
        ([memory.fd], VALID | {"num_blocks": [17]}, ShapeError, r"the geometry needs 131,072"),
    ]
    with path.open("r+b") as file:
        cases.append(([file.fileno()], VALID, UnsupportedOption, "not sealed shared memory"))
        for fds, content, error, says in cases:
            one, other = socket.socketpair()
            with one, other:
                send(one, packed(KIND, content), fds)
                with pytest.raises(error, match=says):
                    open_pool(other, timeout=5)


def test_connections_that_cannot_carry_descriptors_are_refused(pair):
    with socket.socket() as internet, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        for connection, says in [(internet, "Unix socket"), (datagrams, "stream"), (5, "Unix socket")]:
            with pytest.raises(UnsupportedOption, match=says):
                open_pool(connection)
            with pytest.raises(UnsupportedOption, match=says):
                export_pool(make(), connection)
