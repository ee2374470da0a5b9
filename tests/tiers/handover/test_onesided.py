"""One-sided reads that fail or write late touch staging memory only."""

import ctypes
import threading
import time

import numpy as np
import pytest

from pagecore import AttentionSpec, Plane, StateSpec
from pagecore.errors import UnsupportedOption
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.transports.addresses import connect
from pagecore.tiers.handover.transports.onesided import MAX_STAGING, OneSidedTransport
from pagecore.tiers.handover.wire import WIRE_VERSION, Answer, Claim, Stream
from tests.tiers.handover.pairs import assert_same, computed, content, fill, import_late, make

TOKENS = list(range(100, 250))
WINDOW = 1 << 15


class Fake(OneSidedTransport):
    """Reads memory of this process; `faults` lists what happens to each read in turn."""

    name = "fake"

    def open_engine(self):
        self.faults, self.late, self.known, self.closed = [], [], {}, 0

    def close_engine(self):
        self.closed += 1

    def register(self, address, nbytes):
        assert not self.closed, "the engine has ended"
        assert address not in self.known
        self.known[address] = nbytes

    def unregister(self, address):
        del self.known[address]

    def own_peer(self):
        return b"here"

    def begin(self, peer, local, remote):
        assert peer == b"here"
        assert any(base <= local < base + nbytes for base, nbytes in self.known.items())
        fault = self.faults.pop(0) if self.faults else None
        if fault == "refuse":
            raise errors.PeerLost("the engine refuses")
        if fault in ("hang", "late"):
            self.late.append((local, remote))
            return fault
        at = local
        for address, nbytes in remote.tolist():
            ctypes.memmove(at, address, nbytes)
            at += nbytes
        if fault == "flip":
            ctypes.c_uint8.from_address(local + 5).value ^= 1
        return fault

    def is_done(self, handle):
        if handle == "fail":
            raise errors.PeerLost("the read failed")
        return handle not in ("hang", "late")

    def forget(self, handle):
        pass

    def wake(self):
        """Write what was given up, with other bytes."""
        for local, remote in self.late:
            ctypes.memset(local, 0x5A, int(remote[:, 1].sum()))


@pytest.fixture
def pair():
    with Fake("tcp://127.0.0.1:0") as exporter, Fake(staging_bytes=2 * WINDOW) as importer:
        yield exporter, importer
    assert (exporter.closed, importer.closed) == (1, 1)


@pytest.fixture
def caches():
    sender, receiver = make(), make()
    fill(sender, 1)
    fill(receiver, 2)
    return sender, computed(sender, TOKENS), receiver


def test_windows_are_read_in_turn(pair, caches):
    sender, sequence, receiver = caches
    arrived = import_sequence(receiver, export_sequence(sender, sequence, transport=pair[0]), transport=pair[1])
    assert_same(content(sender, sequence), content(receiver, arrived))
    assert pair[0].drain(10)
    assert pair[1].num_lost_bytes == 0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("fault", "error", "is_lost"),
    [
        ("refuse", errors.PeerLost, True),
        ("fail", errors.PeerLost, True),
        ("hang", errors.DeadlineExceeded, True),
        ("late", errors.DeadlineExceeded, True),
        ("flip", errors.CorruptTransfer, None),
    ],
)
def test_a_failed_read_is_an_error_and_its_late_bytes_reach_no_block(pair, caches, fault, error, is_lost, which):
    exporter, importer = pair
    sender, sequence, receiver = caches
    manifest = export_sequence(sender, sequence, transport=exporter)
    importer.faults = [None] * which + [fault]
    if error is errors.DeadlineExceeded:
        import_late(receiver, manifest, importer, lambda: not importer.faults)
    else:
        with pytest.raises(error):
            import_sequence(receiver, manifest, transport=importer)
    assert receiver.num_sequences == 0
    receiver.check_invariants()
    if is_lost is not None:
        assert importer.num_lost_bytes == 2 * WINDOW
    arrived = import_sequence(receiver, manifest, transport=importer)
    expected = content(sender, sequence)
    assert_same(expected, content(receiver, arrived))
    importer.wake()
    assert_same(expected, content(receiver, arrived))
    assert exporter.drain(10)


def test_lost_memory_is_bounded(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    manifest = export_sequence(sender, sequence, transport=exporter)
    importer.faults = ["hang"] * 1000
    while importer.num_lost_bytes < MAX_STAGING * 2 * WINDOW:  # an import may be late before it reads
        with pytest.raises(errors.DeadlineExceeded):
            import_sequence(receiver, manifest, transport=importer, deadline=0.02)
    with pytest.raises(errors.HandoverError, match="are lost to abandoned reads; close the transport"):
        import_sequence(receiver, manifest, transport=importer)
    assert receiver.num_sequences == 0
    with Fake(staging_bytes=2 * WINDOW) as other:
        assert_same(content(sender, sequence), content(receiver, import_sequence(receiver, manifest, transport=other)))


def test_a_lease_that_ends_leaves_the_rows_to_a_reader_that_has_begun(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    manifest = export_sequence(sender, sequence, transport=exporter, lease=0.1)
    with connect(exporter.address, time.monotonic_ns() + 10**10) as connection:
        stream = Stream(connection, time.monotonic_ns() + 10**10, "the exporter")
        stream.send(Claim(WIRE_VERSION, manifest.export, False, [], False, False))
        assert stream.receive(Answer).grant.lease <= 0.1
        assert not exporter.drain(0.2)
        assert sender.num_sequences == 2
        sender.check_invariants()
        with pytest.raises(errors.LeaseExpired):
            import_sequence(receiver, manifest, transport=importer)
    assert exporter.drain(10)
    assert sender.num_sequences == 1
    sender.check_invariants()


def test_an_importer_gives_up_when_the_lease_ends(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    importer.faults = ["hang"]
    manifest = export_sequence(sender, sequence, transport=exporter, lease=0.1)
    with pytest.raises(errors.LeaseExpired):
        import_sequence(receiver, manifest, transport=importer)
    assert exporter.drain(10)
    assert (sender.num_sequences, receiver.num_sequences) == (1, 0)


def test_several_imports_share_the_staging_memory(pair, caches):
    exporter, importer = pair
    sender, sequence, _ = caches
    manifest = export_sequence(sender, sequence, transport=exporter, readers=8)
    receivers = [make() for _ in range(8)]
    running = [start_import(each, manifest, transport=importer) for each in receivers]
    for one, cache in zip(running, receivers, strict=True):
        assert_same(content(sender, sequence), content(cache, one.result()))
    assert exporter.drain(10)
    assert len(importer.known) <= MAX_STAGING


def test_larger_units_replace_staging_memory_that_is_too_small(pair):
    exporter, importer = pair
    for dim in (8, 64, 256, 512, 1024, 1500):
        specs = [AttentionSpec(4, dim, dtype="float32")]
        sender, receiver = make(specs), make(specs)
        sequence = computed(sender, TOKENS[:60])
        arrived = import_sequence(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
        assert_same(content(sender, sequence), content(receiver, arrived))
    assert len(importer.known) <= MAX_STAGING


def test_memory_of_checkpoints_is_registered_as_long_as_the_export(pair):
    exporter, importer = pair
    state = StateSpec((Plane("temporal", (2, 4, 4), "float32", per="sequence"),), chunk=16, interval=32)
    specs = [make().spec(0), state]
    sender, receiver = make(specs), make(specs)
    fill(sender, 3)
    sequence = computed(sender, TOKENS[:70])
    registered = []
    for _ in range(3):
        manifest = export_sequence(sender, sequence, transport=exporter)
        registered.append(len(exporter.known))
        receiver.remove(import_sequence(receiver, manifest, transport=importer))
        receiver.clear_prefix_cache()
        assert exporter.drain(10)
    assert len(set(registered)) == 1


class AsksWhileClosing(Fake):
    """Answers a claim once its engine has ended."""

    def open_engine(self):
        super().open_engine()
        self.is_asked, self.has_ended = threading.Event(), threading.Event()

    def respond(self, *answer):
        self.is_asked.set()
        assert self.has_ended.wait(20)
        super().respond(*answer)

    def own_peer(self):
        assert not self.closed, "the engine has ended"
        return super().own_peer()

    def close_engine(self):
        super().close_engine()
        self.has_ended.set()


def test_a_transport_that_closes_asks_its_engine_nothing_more(caches):
    sender, sequence, receiver = caches
    with AsksWhileClosing("tcp://127.0.0.1:0") as exporter, Fake(staging_bytes=2 * WINDOW) as importer:
        manifest = export_sequence(sender, sequence, transport=exporter)
        running = start_import(receiver, manifest, transport=importer)
        assert exporter.is_asked.wait(20)
        exporter.close()
        with pytest.raises(errors.PeerLost):
            running.result()
        with pytest.raises(UnsupportedOption, match="the transport is closed; make a new one"):
            export_sequence(sender, sequence, transport=exporter)
    sender.check_invariants()
    assert sender.num_sequences == 1


def test_no_thread_is_left(caches):
    before = threading.active_count()
    sender, sequence, receiver = caches
    with Fake("tcp://127.0.0.1:0") as exporter, Fake(staging_bytes=2 * WINDOW) as importer:
        importer.faults = ["hang"]
        running = start_import(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
        while not importer.late:
            time.sleep(0.001)
        importer.close()
        with pytest.raises(errors.ImportCancelled):
            running.result()
    assert threading.active_count() <= before
    assert np.array_equal(receiver.num_sequences, 0)
    receiver.check_invariants()
