"""A transport that closes: the reader that it is accepting ends with it, and it writes to no descriptor afterwards."""

import os
import socket
import threading

import pytest

from pagecore.tiers.handover.transports import server
from pagecore.tiers.handover.transports.addresses import enlarge
from tests.tiers.handover.failing import Case


def test_a_reader_that_is_being_accepted_ends_with_its_server(tmp_path, monkeypatch):
    is_accepting, may_go_on = threading.Event(), threading.Event()

    def wait(connection):
        is_accepting.set()
        assert may_go_on.wait(20)
        enlarge(connection)

    monkeypatch.setattr(server, "enlarge", wait)
    before = set(threading.enumerate())
    path = tmp_path / "offers.sock"
    offers = server.OfferServer(f"unix://{path}", lambda *_: None, is_revocable=True)
    with socket.socket(socket.AF_UNIX) as importer:
        importer.settimeout(20)
        importer.connect(str(path))
        assert is_accepting.wait(20)
        closing = threading.Thread(target=offers.close)
        closing.start()
        while not offers._is_closed:
            pass
        may_go_on.set()
        closing.join(5)  # a reader without a claim would live for 10 s
        assert set(threading.enumerate()) <= before
        assert importer.recv(1) == b""


def test_an_export_that_is_withdrawn_after_its_transport_closed_is_left_alone(sockets):
    case = Case(sockets)
    manifest = case.export()
    wake = case.exporter._server._wake
    case.exporter.close()
    opened = [os.eventfd(0, os.EFD_NONBLOCK)]
    try:
        while opened[-1] < wake:
            opened.append(os.dup(opened[0]))
        assert wake in opened  # its number belongs to another file now
        case.exporter.withdraw(manifest.export)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(opened[0])
    finally:
        for each in opened:
            os.close(each)
    case.check_released()
