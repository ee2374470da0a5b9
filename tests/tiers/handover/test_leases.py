"""Leases that importers change: they give an export up before its lease ends, and extend the lease while they wait."""

import socket
import time
from dataclasses import replace

import pytest

from pagecore import ShapeError, TensorParallel, UnsupportedOption
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.leases import extend_lease, release_export
from tests.tiers.handover.failing import TOKENS, Case
from tests.tiers.handover.pairs import assert_same, computed, content, make
from tests.tiers.handover.relay import Relay


def test_a_request_that_is_aborted_before_its_import_releases_the_export(pair):
    case = Case(pair)
    manifest = case.export().encode()
    assert case.sender.num_sequences == 2
    release_export(manifest, transport=case.importer)
    case.check_released(5)  # the lease has 30 seconds
    release_export(manifest, transport=case.importer)  # it has ended already
    with pytest.raises(errors.LeaseExpired):
        case.start(manifest).result()
    case.check_unchanged()
    case.check_works()
    case.check_released(5)


def test_a_cancelled_import_gives_up_its_part_alone(tcp):
    case = Case(tcp)
    with Relay(case.exporter.address, "hang", 5000) as relay:
        manifest = case.export(readers=2)
        running = case.start(replace(manifest, address=relay.address))
        assert relay.reached.wait(5)
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
        assert case.importer.drain(5)
    assert case.sender.num_sequences == 2  # for the other reader
    arrived = case.start(manifest).result()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released(5)


def test_a_cancelled_import_from_two_ranks_gives_up_what_it_has_not_read(tcp):
    exporter, importer = tcp
    senders = [make(parallel=TensorParallel(rank, 2)) for rank in range(2)]
    manifests = [export_sequence(sender, computed(sender, TOKENS), transport=exporter, readers=2) for sender in senders]
    receiver = make()
    with Relay(exporter.address, "hang", 500) as relay:
        running = start_import(
            receiver, [manifests[0], replace(manifests[1], address=relay.address)], transport=importer
        )
        assert relay.reached.wait(5)  # the rows of rank 0 have arrived
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
        assert importer.drain(5)
    assert receiver.num_sequences == 0
    assert [sender.num_sequences for sender in senders] == [2, 2]
    import_sequence(receiver, manifests, transport=importer)  # the second reader of both
    assert exporter.drain(5)
    assert [sender.num_sequences for sender in senders] == [1, 1]
    receiver.check_invariants()


def test_a_cancelled_import_does_not_wait_for_an_exporter_that_hangs(sockets, tmp_path):
    case = Case(sockets)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(8)
        running = case.start(replace(case.export(), address=f"unix://{tmp_path}/silent"))
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
        case.check_unchanged()
        case.importer.close()  # ends the release under way


def test_an_export_whose_exporter_is_gone_cannot_be_released(sockets, tmp_path):
    case = Case(sockets)
    manifest = case.export()
    with pytest.raises(errors.PeerLost, match="nothing answers"):
        release_export(replace(manifest, address=f"unix://{tmp_path}/none"), transport=case.importer)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(8)
        hanging = replace(manifest, address=f"unix://{tmp_path}/silent")
        with pytest.raises(errors.DeadlineExceeded):
            release_export(hanging, transport=case.importer, deadline=0.02)
    with pytest.raises(UnsupportedOption, match="of transport 'nixl'"):
        release_export(replace(manifest, transport="nixl"), transport=case.importer)
    with pytest.raises(ShapeError, match="deadline"):
        release_export(manifest, transport=case.importer, deadline=0)
    release_export([manifest], transport=case.importer)
    case.check_released(5)


def test_a_lease_is_extended_while_a_request_waits(pair):
    case = Case(pair)
    manifest = case.export(lease=30.0)
    offer = case.exporter._server._offers[manifest.export]
    first = offer.expires
    extend_lease([manifest], transport=case.importer, lease=0.001)
    assert offer.expires == first  # nothing is taken away
    begun = time.monotonic_ns()
    extend_lease(manifest.encode(), transport=case.importer, lease=60.0)
    assert offer.expires >= begun + 60 * 10**9
    arrived = case.start(manifest).result()
    assert_same(content(case.sender, case.sequence), content(case.receiver, arrived))
    case.check_released(5)


def test_the_lease_of_an_export_that_has_ended_cannot_be_extended(sockets):
    case = Case(sockets)
    manifest = case.export(lease=0.01)
    case.check_released(5)
    with pytest.raises(errors.LeaseExpired):
        extend_lease(manifest, transport=case.importer, lease=1.0)
    case.check_works()


@pytest.mark.parametrize("lease", [0, -1.0, float("nan"), float("inf"), "x"])
def test_leases_out_of_range_are_refused(sockets, lease):
    case = Case(sockets)
    manifest = case.export()
    with pytest.raises(ShapeError, match="lease"):
        extend_lease(manifest, transport=case.importer, lease=lease)
    until = time.monotonic_ns() + 10**10
    if lease != 0 and not isinstance(lease, str):  # an importer that does not check
        before = case.exporter._server._offers[manifest.export].expires
        case.importer.change_lease(manifest, lease, until).run()
        assert case.exporter._server._offers[manifest.export].expires == before
    release_export(manifest, transport=case.importer)
    case.check_released(5)
