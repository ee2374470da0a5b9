"""Faults of the disk end in a miss or in the right bytes, and leave every slot and hold in its place."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pagecore.errors import NotEnoughMemory, UnsupportedOption
from tests.tiers.disk.kit import PAYLOAD, FileOps, Memory, finish, get, keys_of, look, open_store, put, short

ROOT = Path(__file__).parent.parent.parent.parent
SLOT = 8192
TABLE = 8192
DATA = TABLE + 4096


def slab_of(store):
    (path,) = store.path.glob("*.slab")
    return path


@pytest.mark.parametrize("error", [errno.EIO, errno.EREMOTEIO, errno.ENODATA])
def test_a_failed_read_is_a_miss_and_drops_the_entry(tmp_path, error):
    ops = FileOps()
    with open_store(tmp_path, ops=ops) as store:
        put(store, range(4))
        look(store, [0, 1])
        ops.on_read = lambda fd, parts, offset: -error if offset == DATA else None
        done = get(store, range(4))
        assert done.ok.tolist() == [False, True, True, True]
        assert done.error == os.strerror(error)
        ops.on_read = None
        assert not look(store, [0]).ok.any()
        store.check_invariants()
        assert store.stats().num_held == 0
        assert put(store, [0]).ok.all()
        assert get(store, [0]).ok.all()


def test_a_dropped_entry_does_not_come_back(tmp_path):
    ops = FileOps()
    with open_store(tmp_path, slots=40, ops=ops) as store:
        put(store, range(36))  # of two units of the table
        ops.on_read = lambda fd, parts, offset: -errno.EIO
        assert not get(store, [0, 35]).ok.any()
        ops.on_read = None
        assert finish(store, store.submit_remove(keys_of(store, [0]))).ok.all()
    with open_store(tmp_path, slots=40) as store:
        assert look(store, range(36)).ok.tolist() == [False, *[True] * 34, False]


def test_an_evicted_entry_does_not_come_back_when_its_successor_was_not_written(tmp_path):
    ops = FileOps()
    with open_store(tmp_path, slots=1, ops=ops) as store:
        put(store, [0])
        ops.on_write = lambda fd, parts, offset: -errno.EIO
        assert not put(store, [1]).ok.any()
        ops.on_write = None
    with open_store(tmp_path, slots=1) as store:
        assert store.num_entries == 0


def test_a_close_that_cannot_clear_an_entry_ends(tmp_path):
    ops = FileOps()
    with open_store(tmp_path, ops=ops) as store:
        put(store, [0])
        ops.on_read = ops.on_write = lambda fd, parts, offset: -errno.EIO
        assert not get(store, [0]).ok.any()
    with open_store(tmp_path) as store:
        assert get(store, [0]).ok.all()  # it was not damaged


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("place", ["payload", "table"])
def test_a_failed_write_publishes_nothing(tmp_path, error, place):
    def fails(fd, parts, offset):
        return -error if (offset < DATA) == (place == "table") else None

    ops = FileOps(on_write=fails)
    with open_store(tmp_path, slots=6, ops=ops) as store:
        done = put(store, range(4))
        assert not done.ok.any()
        assert done.error == os.strerror(error)
        assert not look(store, range(4)).ok.any()
        store.check_invariants()
        ops.on_write = None
        assert put(store, range(6)).ok.all()
        assert get(store, range(6)).ok.all()
    with open_store(tmp_path, slots=6) as store:
        assert get(store, range(6)).ok.all()


def test_the_other_entries_of_a_batch_are_published(tmp_path):
    ops = FileOps(on_write=lambda fd, parts, offset: -errno.EIO if offset == DATA + SLOT else None)
    with open_store(tmp_path, slots=6, ops=ops) as store:
        assert put(store, range(4)).ok.tolist() == [True, False, True, True]
        assert look(store, range(4)).ok.tolist() == [True, False, True, True]
    with open_store(tmp_path, slots=6) as store:
        assert store.num_entries == 3
        assert get(store, range(4)).ok.tolist() == [True, False, True, True]


def test_a_write_that_fails_over_an_old_entry_is_not_served_after_reopening(tmp_path):
    ops = FileOps()
    with open_store(tmp_path, slots=2, ops=ops) as store:
        put(store, [0, 1])

        def torn(fd, parts, offset):
            os.pwritev(fd, short(parts, 4096), offset)
            return -errno.EIO

        ops.on_write = torn
        assert not put(store, [2, 3]).ok.any()
        ops.on_write = None
    with open_store(tmp_path, slots=2) as store:
        assert not get(store, range(4)).ok.any()
        store.check_invariants()


def test_short_transfers_are_continued(tmp_path):
    def read(fd, parts, offset):
        return os.preadv(fd, short(parts, 512), offset)

    def write(fd, parts, offset):
        return os.pwritev(fd, short(parts, 1024), offset)

    ops = FileOps(read, write)
    with open_store(tmp_path, ops=ops) as store:
        assert put(store, range(5)).ok.all()
        assert get(store, range(5)).ok.all()
        assert ops.num_reads >= 5 * 10
    with open_store(tmp_path, ops=ops) as store:
        assert get(store, range(5)).ok.all()


def test_interrupted_calls_are_repeated(tmp_path):
    seen = set()

    def once(fd, parts, offset):
        first = offset not in seen
        seen.add(offset)
        return -errno.EINTR if first else None

    ops = FileOps(once, once)
    with open_store(tmp_path, ops=ops) as store:
        assert put(store, range(3)).ok.all()
        seen.clear()
        assert get(store, range(3)).ok.all()


@pytest.mark.parametrize("moved", [0, 1 << 20])
def test_transfers_that_end_early_or_claim_too_much_are_errors(tmp_path, moved):
    ops = FileOps()
    with open_store(tmp_path, ops=ops) as store:
        put(store, range(2))
        ops.on_read = ops.on_write = lambda fd, parts, offset: moved
        assert not put(store, [5]).ok.any()
        assert not get(store, [0, 1]).ok.any()
        store.check_invariants()


def test_a_file_that_was_cut_is_a_miss(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(8))
        os.truncate(slab_of(store), DATA + 3 * SLOT)
        done = get(store, range(8))
        assert done.ok.tolist() == [True] * 3 + [False] * 5
        assert store.num_entries == 3
        store.check_invariants()


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_a_flipped_bit_of_a_payload_is_a_miss(tmp_path):
    rng = np.random.default_rng(3)
    with open_store(tmp_path, slots=8) as store:
        put(store, range(8))
        path = slab_of(store)
    for slot in range(7):
        flip(path, 8 * (DATA + slot * SLOT) + int(rng.integers(0, PAYLOAD * 8)))
    with open_store(tmp_path, slots=8) as store:
        assert store.num_entries == 8
        look(store, range(8))
        done = get(store, range(8))
        assert done.ok.tolist() == [False] * 7 + [True]
        assert "sum" in done.error
        assert store.num_entries == 1
        store.check_invariants()
        assert store.stats().num_held == 0
    with open_store(tmp_path, slots=8) as store:
        assert not get(store, range(7)).ok.any()  # the old entries may be there still, and fail again


@pytest.mark.slow
def test_a_flipped_bit_of_an_entry_is_a_miss(tmp_path):
    """Each bit of one entry in turn: another key, slot, length, sequence or sum, or a damaged one."""
    with open_store(tmp_path, slots=2) as store:
        put(store, [0, 1])
        path = slab_of(store)
    for bit in range(0, 128 * 8, 5):
        flip(path, 8 * TABLE + bit)
        with open_store(tmp_path, slots=2, threads=1) as store:
            assert get(store, [0, 1]).ok.tolist() == [False, True], bit
        flip(path, 8 * TABLE + bit)
    with open_store(tmp_path, slots=2) as store:
        assert get(store, [0, 1]).ok.all()


def test_entries_of_another_slot_or_slab_are_not_believed(tmp_path):
    for folder in ("a", "b"):
        with open_store(tmp_path / folder, slots=4, payloads=(PAYLOAD, PAYLOAD)) as store:
            put(store, range(2), lane=0)
            put(store, range(2, 4), lane=1)
            first, second = sorted(store.path.glob("*.slab"))
    entries = first.read_bytes()[TABLE : TABLE + 256]
    with second.open("r+b") as file:  # an entry of lane 0 in the table of lane 1
        file.seek(TABLE)
        file.write(entries)
    with first.open("r+b") as file:  # entries that changed places
        file.seek(TABLE)
        file.write(entries[128:] + entries[:128])
    with open_store(tmp_path / "b", slots=4, payloads=(PAYLOAD, PAYLOAD)) as store:
        assert store.num_entries == 0


def test_a_failing_load_leaves_the_slot_alone_while_another_load_reads_it(tmp_path):
    ops = FileOps()
    with open_store(tmp_path, slots=2, threads=2, ops=ops) as store:
        put(store, [0, 1])
        for _ in range(3):
            look(store, [0])
        ops.on_read = lambda fd, parts, offset: -errno.EIO
        assert not get(store, [0]).ok.any()
        ops.on_read = None
        store.check_invariants()
        assert not put(store, [0]).ok.any()  # two lookups hold the slot of the damaged entry
        assert put(store, [5, 6]).ok.tolist() == [True, False]
        store.unlock(keys_of(store, [0]))
        assert not get(store, [0]).ok.any()  # a miss that ends the last hold
        store.check_invariants()
        assert put(store, [0]).ok.all()
        assert get(store, [0]).ok.all()


def test_a_limit_of_the_file_size_is_no_room(tmp_path):
    """RLIMIT_FSIZE: allocation fails, and nothing is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(NotEnoughMemory, match="smaller max_bytes"):
            open_store(tmp_path / "new" / "folder", slots=100)
        assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with open_store(tmp_path, slots=4) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (DATA + SLOT, before[1]))
        try:
            assert put(store, range(3)).ok.tolist() == [True, False, False]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.check_invariants()
        assert put(store, range(4)).ok.all()
        assert get(store, range(4)).ok.all()


class Trouble:
    """File operations that fail at random: errors, short and torn transfers, flipped bits, calls that do nothing."""

    def __init__(self, seed, share):
        self.rng = np.random.default_rng(seed)
        self.share = share
        self.lock = threading.Lock()

    def draw(self, kinds):
        with self.lock:
            return self.rng.choice(kinds) if self.rng.random() < self.share else None, int(self.rng.integers(1 << 30))

    def read(self, fd, parts, offset):
        kind, number = self.draw(["error", "short", "flip", "nothing"])
        if kind == "error":
            return -errno.EIO
        if kind == "short":
            return os.preadv(fd, short(parts, number % 8192), offset)
        if kind == "flip":
            moved = os.preadv(fd, parts, offset)
            parts[0][number % len(parts[0])] ^= 1 << number % 7
            return moved
        return sum(len(part) for part in parts) if kind == "nothing" else None

    def write(self, fd, parts, offset):
        kind, number = self.draw(["error", "short", "torn", "lost"])
        if kind == "error":
            return -errno.ENOSPC
        if kind == "short":
            return os.pwritev(fd, short(parts, number % 8192), offset)
        if kind == "torn":
            os.pwritev(fd, short(parts, number % 8192), offset)
            return -errno.EIO
        return sum(len(part) for part in parts) if kind == "lost" else None


@pytest.mark.parametrize("seed", range(3 if os.environ.get("PAGECORE_FAULTS") != "full" else 100))
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_random_faults_never_serve_wrong_bytes_and_leak_nothing(tmp_path, seed, share):
    """`get` compares every byte that a load reports; the folder is opened again and again with what the faults left."""
    rng = np.random.default_rng(seed)
    num_loaded = 0
    for _ in range(3):
        trouble = Trouble(seed, share)
        ops = FileOps()
        with open_store(tmp_path, slots=10, threads=3, ops=ops) as store:
            ops.on_read, ops.on_write = trouble.read, trouble.write
            for _ in range(25):
                numbers = rng.integers(0, 25, 4)
                put(store, numbers)
                look(store, numbers[:2])
                num_loaded += get(store, rng.permutation(25)[:6]).ok.sum()
                store.unlock(keys_of(store, numbers[:2]))
                store.check_invariants()
            assert store.stats().num_held == 0
            assert store.stats().num_pending == 0
    assert num_loaded > 20
    with open_store(tmp_path, slots=10) as store:
        get(store, range(25))
        assert put(store, range(100, 110)).ok.all()
        assert get(store, range(100, 110)).ok.all()


WRITER = """
import sys
from tests.tiers.disk.kit import *
store = open_store(sys.argv[1], slots=40, threads=4)
print("open", flush=True)
for start in range(0, 100_000, 4):
    put(store, range(start % 120, start % 120 + 4))
    print("stored", flush=True)
"""


@pytest.mark.serial
def test_a_writer_that_is_killed_leaves_whole_entries(tmp_path):
    for num_batches in (0, 3, 40):  # the store is empty, has room, and writes over old entries
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"open\n"
            with pytest.raises(Exception, match="open in another store"):
                open_store(tmp_path, slots=40)
            for _ in range(num_batches):
                assert writer.stdout.readline() == b"stored\n"
            writer.send_signal(signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
        with open_store(tmp_path, slots=40) as store:
            num_entries = store.num_entries
            done = get(store, range(124))
            assert done.ok.sum() >= num_entries - 4 * 4
            assert num_entries >= min(4 * num_batches, 36)  # the last batch may be half written
            store.check_invariants()


@pytest.mark.serial
def test_a_child_of_fork_is_refused_and_the_parent_goes_on(tmp_path):
    import warnings

    with open_store(tmp_path) as store:
        put(store, range(4))
        keys = keys_of(store, range(4))
        memory = Memory(4)
        ticket = store.submit_load(keys, memory.pieces)
        locked, may_end = threading.Event(), threading.Event()

        def hold():
            with store._lock:
                locked.set()
                may_end.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                inherited = os.listdir("/proc/self/fd")
                assert not any(
                    "slab" in os.readlink(f"/proc/self/fd/{fd}")
                    for fd in inherited
                    if os.path.exists(f"/proc/self/fd/{fd}")
                )
                for call in (store.submit_lookup, lambda k: store.submit_store(k, memory.pieces)):
                    with pytest.raises(UnsupportedOption, match="fork"):
                        call(keys)
                assert store.poll() == []
                assert store.drain(1)
                store.unlock(keys)
                store.cancel(ticket)
                assert store.stats().num_stored == 0
                assert len(store.keys()) == len(store.take_evicted()) == store.has(keys).sum() == 0
                store.check_invariants()
                store.close()
                del store
                code = 0
            finally:
                os._exit(code)
        may_end.set()
        holder.join()
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert finish(store, ticket).ok.all()
        assert put(store, [9]).ok.all()
        with pytest.raises(Exception, match="open in another store"):
            open_store(tmp_path)
        store.check_invariants()
