"""Two processes: sequences arrive between them, and either survives the death of the other."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.manifest import Manifest
from tests.tiers.handover.child import prepared
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.pairs import assert_same, content, make
from tests.tiers.handover.relay import Relay

ROOT = Path(__file__).parents[3]


@contextmanager
def child(role, kind, folder):
    """Another process; it is killed at the end."""
    command = [sys.executable, "-m", "tests.tiers.handover.child", role, kind, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PAGECORE_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process, word):
    """Read the line of a child that begins with a word."""
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    pytest.fail(f"the other process ended before {word}")


@pytest.mark.slow
def test_a_sequence_arrives_from_another_process_which_may_die(pair, request, tmp_path):
    kind = request.node.callspec.params["pair"]
    exporter, importer = pair
    cache, sequence = prepared()
    receiver = make(num_blocks=100)
    with child("export", kind, tmp_path) as process:
        manifest = Manifest.decode(bytes.fromhex(told(process, "MANIFEST")))
        arrived = import_sequence(receiver, manifest, transport=importer)
        assert_same(content(cache, sequence), content(receiver, arrived))
        receiver.remove(arrived)
        receiver.clear_prefix_cache()
        process.send_signal(signal.SIGSTOP)
        running = start_import(receiver, manifest, transport=importer)
        time.sleep(0.05)
        assert not running.poll()
        process.kill()
        with pytest.raises(errors.PeerLost):
            running.result()
        assert receiver.num_sequences == 0
        receiver.check_invariants()
        with pytest.raises(errors.PeerLost):
            import_sequence(receiver, manifest, transport=importer)
    assert receiver.num_sequences == 0
    receiver.check_invariants()
    arrived = import_sequence(receiver, export_sequence(cache, sequence, transport=exporter), transport=importer)
    assert_same(content(cache, sequence), content(receiver, arrived))
    assert exporter.drain(10)


@pytest.mark.slow
def test_an_exporter_that_dies_in_the_middle_is_a_lost_peer(tmp_path):
    receiver = make(num_blocks=100)
    with pair_of("tcp", tmp_path) as (_, importer), child("export", "tcp", tmp_path) as process:
        manifest = Manifest.decode(bytes.fromhex(told(process, "MANIFEST")))
        with Relay(manifest.address, "hang", 50_000) as relay:
            running = start_import(receiver, replace(manifest, address=relay.address), transport=importer)
            assert relay.reached.wait(10)
            process.kill()
            process.wait()
        with pytest.raises(errors.PeerLost):
            running.result()
    assert receiver.num_sequences == 0
    receiver.check_invariants()


@pytest.mark.slow
def test_an_importer_that_dies_in_the_middle_leaves_the_rows_to_the_next(tmp_path):
    cache, sequence = prepared()
    with pair_of("tcp", tmp_path) as (exporter, importer), Relay(exporter.address, "hang", 50_000) as relay:
        manifest = export_sequence(cache, sequence, transport=exporter)
        with child("import", "tcp", tmp_path) as process:
            told(process, "READY")
            process.stdin.write(replace(manifest, address=relay.address).encode().hex() + "\n")
            process.stdin.flush()
            assert relay.reached.wait(20)
        assert cache.num_sequences == 2
        cache.check_invariants()
        receiver = make(num_blocks=100)
        arrived = import_sequence(receiver, manifest, transport=importer)
        assert_same(content(cache, sequence), content(receiver, arrived))
        assert exporter.drain(10)
    assert cache.num_sequences == 1
    cache.check_invariants()


@pytest.mark.slow
def test_another_process_imports(tmp_path):
    cache, sequence = prepared()
    with pair_of("unix", tmp_path) as (exporter, _), child("import", "tcp", tmp_path) as process:
        told(process, "READY")
        manifest = export_sequence(cache, sequence, transport=exporter)
        process.stdin.write(manifest.encode().hex() + "\n")
        process.stdin.flush()
        told(process, "arrived")
        assert exporter.drain(10)
    assert cache.num_sequences == 1
    cache.check_invariants()
