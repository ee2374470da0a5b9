"""A peer that fails ends a hand-over in a typed error, with the importing cache as before and no rows held for ever."""

import errno
import gc
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from pagecore import (
    InvalidSequence,
    ShapeError,
    UnsupportedOption,
)
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.transports import server
from pagecore.tiers.handover.transports.addresses import connect
from pagecore.tiers.handover.transports.sockets import SocketTransport
from pagecore.tiers.handover.wire import WIRE_VERSION, Answer, Claim, Part, Stream
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.failing import TOKENS, Case
from tests.tiers.handover.pairs import assert_same, computed, content, make
from tests.tiers.handover.relay import Relay


@pytest.mark.parametrize("after", [0, 3, 40, 5_000, 30_000])
def test_a_connection_that_is_cut_is_a_lost_peer(tcp, after):
    case = Case(tcp)
    with Relay(case.exporter.address, "cut", after) as relay:
        manifest = case.export()
        with pytest.raises(errors.PeerLost, match="closed the connection"):
            case.start(replace(manifest, address=relay.address)).result()
    case.check_unchanged(bytes_too=False)
    arrived = case.start(manifest).result()  # within the lease another import may try again
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released()


@pytest.mark.parametrize("after", [0, 40, 5_000])
def test_a_peer_that_hangs_ends_at_the_deadline(tcp, after):
    case = Case(tcp)
    with Relay(case.exporter.address, "hang", after) as relay:
        manifest = replace(case.export(), address=relay.address)
        with pytest.raises(errors.DeadlineExceeded, match="before the deadline"):
            case.start(manifest, deadline=0.2).result()
    case.check_unchanged(bytes_too=False)
    case.exporter.withdraw(manifest.export)
    case.check_released()
    case.check_works()


@pytest.mark.parametrize("after", [2, 30, 200, 5_000, 30_000])
def test_a_flipped_bit_is_never_served(tcp, after):
    case = Case(tcp)
    with Relay(case.exporter.address, "flip", after) as relay:
        manifest = replace(case.export(), address=relay.address)
        with pytest.raises(errors.HandoverError):
            case.start(manifest, deadline=1).result()
    case.check_unchanged(bytes_too=False)
    case.check_works()


def test_nobody_answers(tcp, tmp_path):
    case = Case(tcp)
    manifest = case.export()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for address in (f"tcp://127.0.0.1:{port}", f"unix://{tmp_path}/none"):
        with pytest.raises(errors.PeerLost, match="nothing answers"):
            case.start(replace(manifest, address=address)).result()
    with pytest.raises(errors.PeerLost, match=r"the host of tcp://a\.\.b:5 is not known"):
        case.start(replace(manifest, address="tcp://a..b:5")).result()
    with pytest.raises(UnsupportedOption, match="give 'tcp://host:port'"):
        case.start(replace(manifest, address="http://x")).result()
    case.check_unchanged()


def test_an_exporter_survives_clients_that_speak_otherwise(tcp):
    case = Case(tcp)
    manifest = case.export()
    host, port = case.exporter.address.removeprefix("tcp://").split(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4abcd", b"\xff" * 100, os.urandom(500)):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(noise)
    arrived = case.start(manifest).result()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released()


class Exhausted:
    """A listening socket whose process has no descriptor left for the next connections."""

    def __init__(self, listener, count):
        self.listener, self.left = listener, count

    def accept(self):
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()

    def __getattr__(self, name):
        return getattr(self.listener, name)


def test_an_exporter_pauses_while_it_has_no_descriptor_left_and_answers_then(tcp, monkeypatch):
    pauses, case = [], Case(tcp)
    monkeypatch.setattr(server.time, "sleep", pauses.append)
    manifest = case.export()
    own = case.exporter._server
    own._listener = Exhausted(own._listener, 3)
    arrived = case.start(manifest).result()
    monkeypatch.undo()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    assert pauses.count(server.PAUSE_SECONDS) == 3
    case.check_released()


@pytest.fixture
def no_threads(monkeypatch):
    """Let the start of threads of some name fail once."""
    start = threading.Thread.start
    failing = set()

    def fails(thread):
        if thread.name in failing:
            failing.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    return failing


def test_an_exporter_without_a_thread_for_a_reader_answers_the_next_one(tcp, no_threads):
    case = Case(tcp)
    manifest = case.export()
    no_threads.add("pagecore-reader")
    with pytest.raises(errors.PeerLost):
        case.start(manifest).result()
    case.check_unchanged()
    arrived = case.start(manifest).result()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released()


def test_an_import_without_a_thread_leaves_nothing(tcp, no_threads):
    case = Case(tcp)
    manifest = case.export()
    no_threads.add("pagecore-import")
    with pytest.raises(errors.HandoverError, match="no thread can be started for the import: can't start new thread"):
        case.start(manifest)
    assert case.importer.num_pulls == 0
    case.check_unchanged()
    arrived = case.start(manifest).result()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released()


def test_a_claim_with_half_a_number_is_refused(tcp):
    case = Case(tcp)
    request = case.export()
    part = Part(0, 8, bytes(5), 0, 1, 0, 4, True, True, False)
    claim = Claim(WIRE_VERSION, request.export, True, [part], False, False)
    deadline = time.monotonic_ns() + 10 * 10**9
    with connect(request.address, deadline) as connection:
        stream = Stream(connection, deadline, "the exporter")
        stream.send(claim)
        refusal = stream.receive(Answer).refusal
    assert (refusal.kind, "5 bytes" in refusal.text) == ("CorruptTransfer", True)
    case.check_works()


# The end of imports and transports.


def test_an_import_can_be_cancelled(tcp):
    case = Case(tcp)
    with Relay(case.exporter.address, "hang", 5000) as relay:
        manifest = case.export()
        running = case.start(replace(manifest, address=relay.address))
        assert relay.reached.wait(5)
        assert not running.poll()
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
        assert running.poll()
        case.check_unchanged(bytes_too=False)
        case.check_released(5)  # the lease has 30 seconds
    with pytest.raises(errors.LeaseExpired):
        case.start(manifest).result()
    case.check_works()


class _Late:
    """A pull whose end waits, once all bytes are there, until `may_end` is set."""

    def __init__(self, pull, has_read, may_end):
        self._pull, self._has_read, self._may_end = pull, has_read, may_end

    def __getattr__(self, name):
        return getattr(self._pull, name)

    def run(self):
        self._pull.run()
        self._has_read.set()
        assert self._may_end.wait(5)


def test_an_import_can_be_cancelled_after_its_last_byte(sockets, monkeypatch):
    case, has_read, may_end = Case(sockets), threading.Event(), threading.Event()
    pull = case.importer.pull
    monkeypatch.setattr(case.importer, "pull", lambda request: _Late(pull(request), has_read, may_end))
    running = case.start(case.export())
    assert has_read.wait(5)
    running.cancel()
    may_end.set()
    with pytest.raises(errors.ImportCancelled):
        running.result()
    case.check_unchanged(bytes_too=False)
    case.check_released(5)


def test_polling_ends_with_a_sequence_and_an_event(sockets):
    case = Case(sockets)
    running = case.start(case.export(), id="named")
    descriptor = running.fileno()
    end = time.monotonic() + 10
    while not running.poll():
        assert time.monotonic() < end
        time.sleep(0.001)
    arrived = running.result()
    assert arrived.id == "named"
    assert case.receiver.sequences["named"] is arrived
    with pytest.raises(InvalidSequence, match="has ended"):
        running.fileno()
    with pytest.raises(OSError, match="Bad file"):
        os.eventfd_read(descriptor)
    running.cancel()  # changes nothing any more
    assert running.result() is arrived


def test_an_import_that_is_dropped_leaves_nothing(sockets):
    case = Case(sockets)
    running = case.start(case.export())
    assert case.importer.drain(10)
    while not running._known.is_set():
        time.sleep(0.001)
    del running
    gc.collect()
    case.check_unchanged(bytes_too=False)
    case.check_released()


def test_other_sequences_go_on_while_one_arrives(tcp):
    case = Case(tcp)
    with Relay(case.exporter.address, "hang", 5000) as relay:
        running = case.start(replace(case.export(), address=relay.address), id="coming")
        assert relay.reached.wait(5)
        coming = case.receiver.sequences["coming"]
        for call in (case.receiver.fork, case.receiver.swap_in):
            with pytest.raises(InvalidSequence):
                call(coming)
        other = computed(case.receiver, list(range(900, 960)))
        case.receiver.check_invariants()
        case.receiver.remove(other)
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
    case.receiver.check_invariants()


def test_closing_a_transport_ends_its_imports_and_exports(tmp_path):
    with pair_of("tcp", tmp_path) as pair:
        case = Case(pair)
        with Relay(case.exporter.address, "hang", 5000) as relay:
            running = case.start(replace(case.export(), address=relay.address))
            assert relay.reached.wait(5)
            case.importer.close()
            with pytest.raises(errors.ImportCancelled):
                running.result()
            case.check_unchanged(bytes_too=False)
            with pytest.raises(UnsupportedOption, match="the transport is closed"):
                case.start(case.export())
            case.check_unchanged(bytes_too=False)
            assert case.sender.num_sequences == 3
            case.exporter.close()
    assert case.sender.num_sequences == 1
    case.sender.check_invariants()
    case.exporter.close()


def test_addresses_that_cannot_be_bound_are_refused(tmp_path, sockets):
    for address in (
        "",
        "tcp://",
        "tcp://host",
        "tcp://127.0.0.1:99999",
        "http://a:1",
        5,
        f"unix://{tmp_path}/no/folder",
    ):
        with pytest.raises(UnsupportedOption, match=r"give 'tcp://host:port'|cannot listen"):
            SocketTransport(address)
    with pytest.raises(UnsupportedOption, match="cannot listen"):
        SocketTransport(sockets[0].address)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UnsupportedOption, match="cannot listen"):
        SocketTransport(f"unix://{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_manifest_survives_its_encoding(sockets):
    case = Case(sockets)
    manifest = case.export(model="m")
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.tokens.tolist() == TOKENS


def test_deadlines_are_checked(sockets):
    case = Case(sockets)
    manifest = case.export()
    for deadline in (0, -1, float("inf"), "x"):
        with pytest.raises(ShapeError, match="deadline"):
            case.start(manifest, deadline=deadline)
    case.check_unchanged()


def test_an_object_that_is_not_a_transport_is_refused(tcp):
    cache = make()
    sequence = computed(cache, TOKENS[:20])
    with pytest.raises(UnsupportedOption, match="transport is None; expected a transport"):
        export_sequence(cache, sequence, transport=None)
    manifest = export_sequence(cache, sequence, transport=tcp[0])
    with pytest.raises(UnsupportedOption, match="transport is None; expected a transport"):
        import_sequence(make(), manifest, transport=None)
