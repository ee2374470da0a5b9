"""Submissions of Mooncake's reads that hang, as they do for up to 60 s where an exporter hangs."""

import ctypes
import gc
import threading
import weakref

import pytest

from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.transports.mooncake import MooncakeTransport
from tests.tiers.handover.pairs import assert_same, computed, content, fill, import_late, make

TOKENS = list(range(100, 250))
WINDOW = 1 << 15


class Engine:
    """An engine for memory of this process; while `goes` is not set, submissions hang. `deaths` notes its end."""

    def __init__(self, deaths):
        self.goes, self.entered, self.fault = threading.Event(), threading.Event(), None
        self.goes.set()
        self._deaths = deaths
        self.num_reads = 0

    def __del__(self):
        self._deaths.append([memory() is not None for memory in self.memories])

    memories = ()

    def get_rpc_port(self):
        return 1

    def register_memory(self, address, nbytes):
        return 0

    def unregister_memory(self, address):
        return 0

    def batch_transfer_async_read(self, name, places, addresses, sizes):
        self.num_reads += 1
        self.entered.set()
        assert self.goes.wait(20), "nothing let the submission go"
        if self.fault is not None:
            raise self.fault
        for place, address, nbytes in zip(places, addresses, sizes, strict=True):
            ctypes.memmove(place, address, nbytes)
        return 7

    def transfer_check_status(self, ticket):
        return 1


class Transport(MooncakeTransport):
    def open_engine(self):
        self.deaths = []
        self._engine = Engine(self.deaths)


@pytest.fixture
def pair():
    with Transport("tcp://127.0.0.1:0") as exporter, Transport(staging_bytes=2 * WINDOW) as importer:
        yield exporter, importer


@pytest.fixture
def caches():
    sender, receiver = make(), make()
    fill(sender, 1)
    fill(receiver, 2)
    return sender, computed(sender, TOKENS), receiver


def submitters():
    return [each for each in threading.enumerate() if each.name == "pagecore-mooncake"]


def test_an_import_ends_at_its_deadline_though_a_submission_hangs(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    manifest = export_sequence(sender, sequence, transport=exporter)
    importer._engine.goes.clear()
    import_late(receiver, manifest, importer, importer._engine.entered.is_set)
    assert receiver.num_sequences == 0
    receiver.check_invariants()
    assert importer.num_lost_bytes == 2 * WINDOW
    importer._engine.goes.set()
    arrived = import_sequence(receiver, manifest, transport=importer)
    assert_same(content(sender, sequence), content(receiver, arrived))


def test_an_import_is_cancelled_though_a_submission_hangs(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    engine = importer._engine
    engine.goes.clear()
    running = start_import(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
    assert engine.entered.wait(30)
    running.cancel()
    with pytest.raises(errors.ImportCancelled):
        running.result()
    engine.goes.set()


def test_memory_outlives_the_engine_if_a_submission_hangs_when_the_transport_closes(pair, caches):
    exporter, importer = pair
    sender, sequence, receiver = caches
    engine = importer._engine
    engine.goes.clear()
    manifest = export_sequence(sender, sequence, transport=exporter)
    import_late(receiver, manifest, importer, engine.entered.is_set)
    engine.memories = tuple(weakref.ref(each.memory) for each in importer._staging)
    threads, goes = submitters(), engine.goes
    del engine
    importer.close()
    assert importer.deaths == []
    assert threads
    gc.collect()  # of the error, whose frames hold the memory
    goes.set()
    for each in threads:
        each.join(30)
    assert importer.deaths == [[True]]


@pytest.mark.parametrize("end", ["deadline", "cancel", "close"])
def test_a_thread_of_an_abandoned_import_submits_no_further_read(pair, caches, end):
    exporter, importer = pair
    sender, sequence, receiver = caches
    engine = importer._engine
    engine.goes.clear()
    manifest = export_sequence(sender, sequence, transport=exporter)
    if end == "deadline":
        import_late(receiver, manifest, importer, engine.entered.is_set)
    else:
        running = start_import(receiver, manifest, transport=importer)
        assert engine.entered.wait(30)
        {"cancel": running.cancel, "close": importer.close}[end]()
        with pytest.raises(errors.HandoverError):
            running.result()
    threads = submitters()
    assert engine.num_reads == len(threads) > 0
    engine.goes.set()
    for each in threads:
        each.join(30)
    assert engine.num_reads == len(threads), "only the reads that hung"


def test_a_thread_that_cannot_start_is_a_failed_import(pair, caches, monkeypatch):
    exporter, importer = pair
    sender, sequence, receiver = caches
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "pagecore-mooncake":
            raise RuntimeError("can't start new thread")
        start(thread)

    manifest = export_sequence(sender, sequence, transport=exporter)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(errors.HandoverError, match="can't start new thread"):
            import_sequence(receiver, manifest, transport=importer)
    assert not importer._submitting
    arrived = import_sequence(receiver, manifest, transport=importer)
    assert_same(content(sender, sequence), content(receiver, arrived))


@pytest.mark.parametrize("fault", [RuntimeError("the engine raises"), None])
def test_a_submission_that_fails_is_a_lost_peer(pair, caches, fault, monkeypatch):
    exporter, importer = pair
    sender, sequence, receiver = caches
    importer._engine.fault = fault
    if fault is None:
        monkeypatch.setattr(importer._engine, "batch_transfer_async_read", lambda *_: 0)
    with pytest.raises(errors.PeerLost, match="the engine raises" if fault else "not reachable"):
        import_sequence(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
    for each in submitters():
        each.join(30)
    assert submitters() == []
