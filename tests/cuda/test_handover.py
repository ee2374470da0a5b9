"""Sequences are handed over between caches on CUDA and on the host, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, LatentSpec, Plane, StateSpec
from tests.capabilities import require
from tests.cuda.caches import on_host
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.pairs import assert_same, content, fill, make

require("msgspec")

from pagecore.tiers.handover.errors import ImportCancelled  # noqa: E402
from pagecore.tiers.handover.exports import export_sequence  # noqa: E402
from pagecore.tiers.handover.imports import import_sequence, start_import  # noqa: E402

FULL = AttentionSpec(2, 8, dtype="float32")
WINDOW = AttentionSpec(2, 8, dtype="float32", window=12)
STATE = StateSpec((Plane("temporal", (2, 4), "float32", per="sequence"),), chunk=8, interval=16)
QUANTISED = StateSpec(
    (Plane("conv", (3,), "float32", per="sequence"), Plane("temporal", (2, 4, 8), "float32", per="sequence")),
    chunk=8,
    interval=16,
    checkpoint_format="int8",
)
SEALED = AttentionSpec(2, 16, dtype="float16", format="kivi2", group_size=16, block_size=16, residual=5)
MODELS = {
    "window": [FULL, WINDOW],
    "int8": [AttentionSpec(2, 32, format="int8_token")],
    "sealed": [SEALED, FULL],
    "latent": [LatentSpec(64, 16, scale=0.1, dtype="bfloat16")],
    "state": [FULL, STATE],
    "int8 state": [FULL, QUANTISED, QUANTISED],
    "states alone": [STATE, STATE],
    "int8 states alone": [QUANTISED],
    "cross": [FULL, CrossSpec(2, 8, dtype="float32")],
    "state and cross": [WINDOW, STATE, CrossSpec(2, 8, dtype="float32")],
}


@pytest.fixture
def sockets(tmp_path):
    with pair_of("unix", tmp_path) as pair:
        yield pair


def fill_any(cuda, cache, seed):
    """Write random bytes to every pool of a cache."""
    if cache.device == "cpu":
        fill(cache, seed)
        return
    rng = np.random.default_rng(seed)
    store = cache._parts.store
    memory = [buffer for pool in store.pools for buffer in pool.buffers]
    memory += [] if store.states is None else store.states.planes()
    for tensor in [*memory, *([] if store.quantiser is None else store.quantiser.pool.planes())]:
        data = rng.integers(0, 256, tensor.nbytes, np.uint8)
        cuda.runtime.copy(tensor.pointer, data.ctypes.data, tensor.nbytes, 0)
        cuda.runtime.synchronize(0)


def content_of(cuda, cache, sequence, monkeypatch):
    """Return `content`, of copies of the pools."""
    cuda.runtime.synchronize(0)
    if cache.device == "cpu":
        return content(cache, sequence)
    store = cache._parts.store
    pools = [on_host(cuda, pool) for pool in store.pools]
    planes = [] if store.states is None else [cuda.get(plane) for plane in store.states.planes()]
    with monkeypatch.context() as patch:
        patch.setattr(store, "pools", pools)
        if planes:
            patch.setattr(store, "states", HostStates(planes))
        return content(cache, sequence)


def checkpoint_of(cuda, cache, sequence):
    """Return the stored bytes of a sequence's checkpoint, and its length."""
    cuda.runtime.synchronize(0)
    slot, length = cache.checkpoint(sequence)
    return [cuda.get(plane[slot]).tobytes() for plane in cache._parts.store.checkpoints.planes()], length


class HostStates:
    def __init__(self, arrays):
        self._arrays = arrays

    def planes(self):
        return [HostPlane(array) for array in self._arrays]


class HostPlane:
    def __init__(self, array):
        self._array = array

    def numpy(self):
        return self._array


def compute(cuda, cache, count, length, cross):
    options = {"cross_tokens": 19, "cross_digest": b"clip"} if cross else {}
    sequence = cache.add_sequence(range(count), **options)
    cache.commit(cache.prepare([sequence], length))
    fill_any(cuda, cache, 1)
    return sequence


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sides", ["device to host", "host to device", "device to device"])
def test_every_byte_arrives(cuda, sockets, monkeypatch, model, sides):
    exporter, importer = sockets
    theirs, mine = (cuda.device if side == "device" else "cpu" for side in sides.split(" to "))
    layers, options = MODELS[model], {"num_blocks": 12, "max_sequences": 4}
    if "state" in model:
        options["num_states"] = 8
    if "alone" in model:
        options["num_blocks"] = None
    if model == "sealed":
        options["block_size"] = 16
    sender = make(layers, device=theirs, **options)
    receiver = make(layers, device=mine, layout="blockwise" if model == "window" else None, **options)
    fill_any(cuda, receiver, 2)
    digest = {"cross_digest": b"clip"} if "cross" in model else {}
    sequence = compute(cuda, sender, 34, 33, bool(digest))
    manifest = export_sequence(sender, sequence, transport=exporter)
    expected = content_of(cuda, sender, sequence, monkeypatch)
    kept = checkpoint_of(cuda, sender, sequence) if "state" in model else None
    if theirs != "cpu":
        assert sender.num_sequences == 1
        fill_any(cuda, sender, 3)  # the export has a copy
    arrived = import_sequence(receiver, manifest.encode(), transport=importer, **digest)
    assert (arrived.num_tokens, arrived.num_computed_tokens) == (34, 33)
    assert_same(expected, content_of(cuda, receiver, arrived, monkeypatch))
    if kept is not None:
        assert checkpoint_of(cuda, receiver, arrived) == kept
        assert kept[1] == 32
    assert exporter.drain(10)
    sender.check_invariants()
    receiver.check_invariants()
    assert receiver.match_length([*range(33), 5]) == (
        0 if digest else kept[1] if kept else 16 if model == "sealed" else 32
    )


def fill_checkpoints(cuda, cache):
    """Write random codes and numbers to every quantised checkpoint."""
    rng = np.random.default_rng(5)
    for plane in cache._parts.store.checkpoints.planes():
        is_code = plane.dtype == "int8"
        data = rng.integers(-128, 128, plane.shape, np.int8) if is_code else rng.normal(size=plane.shape)
        data = np.ascontiguousarray(data.astype(plane.dtype))
        if cache.device == "cpu":
            plane.numpy()[...] = data
        else:
            cuda.runtime.copy(plane.pointer, data.ctypes.data, data.nbytes, 0)
            cuda.runtime.synchronize(0)


def begun(cuda, cache, sequence):
    """Return the state that the next step of a sequence reads."""
    cache.append_tokens([sequence], [[5]])
    batch = cache.prepare([sequence], 1)
    cuda.runtime.synchronize(0)
    slot = int(batch.host.states.state_read.numpy()[0])
    found = [cuda.get(plane[slot]).tobytes() for plane in cache._parts.store.states.planes()]
    cache.abandon(batch)
    return found


@pytest.mark.parametrize("model", ["int8 state", "int8 states alone"])
@pytest.mark.parametrize("sides", ["device to host", "host to device", "device to device"])
def test_a_sequence_that_rests_in_a_quantised_checkpoint_arrives_with_its_state(cuda, sockets, model, sides):
    exporter, importer = sockets
    options = {"num_blocks": None if "alone" in model else 12, "max_sequences": 4, "num_states": 8}
    devices = [cuda.device if side == "device" else "cpu" for side in sides.split(" to ")]
    sender, receiver = (make(MODELS[model], device=device, **options) for device in devices)
    fill_any(cuda, receiver, 2)
    with sender.add_sequence(range(20)) as first:
        sender.commit(sender.prepare([first], 20))
    fill_checkpoints(cuda, sender)
    sequence = sender.add_sequence(range(21))
    assert (sender.state_slot(sequence), sequence.num_computed_tokens) == (0, 16)
    kept = checkpoint_of(cuda, sender, sequence)
    manifest = export_sequence(sender, sequence, transport=exporter)
    expected = begun(cuda, sender, sequence)
    if sender.device != "cpu":
        fill_any(cuda, sender, 3)  # the export has a copy
    arrived = import_sequence(receiver, manifest.encode(), transport=importer)
    assert (arrived.num_tokens, arrived.num_computed_tokens) == (21, 16)
    assert checkpoint_of(cuda, receiver, arrived) == kept
    assert begun(cuda, receiver, arrived) == expected
    assert exporter.drain(10)
    sender.check_invariants()
    receiver.check_invariants()
    assert receiver.match_length([*range(20), 5]) == 16


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [({}, {"block_size": 12}), ({"block_size": 5}, {"block_size": 8, "layout": "BNHD"}), ({"layout": "LCBNHD"}, {})],
)
def test_block_sizes_and_layouts_may_differ(cuda, sockets, monkeypatch, theirs, mine):
    exporter, importer = sockets
    layers, options = [FULL, CrossSpec(2, 8, dtype="float32")], {"device": cuda.device, "max_sequences": 4}
    sender, receiver = make(layers, **options, **theirs), make(layers, **options, **mine)
    fill_any(cuda, receiver, 2)
    sequence = compute(cuda, sender, 34, 33, True)
    manifest = export_sequence(sender, sequence, transport=exporter)
    arrived = import_sequence(receiver, manifest, transport=importer, cross_digest=b"clip")
    assert_same(content_of(cuda, sender, sequence, monkeypatch), content_of(cuda, receiver, arrived, monkeypatch))
    receiver.check_invariants()


def test_one_sided_transports_read_the_copy_and_forget_it(cuda, tmp_path, monkeypatch):
    layers, options = MODELS["state and cross"], {"num_states": 8, "max_sequences": 4}
    sender, receiver = (make(layers, device=cuda.device, **options) for _ in range(2))
    sequence = compute(cuda, sender, 34, 33, True)
    with pair_of("mooncake", tmp_path) as (exporter, importer):
        manifest = export_sequence(sender, sequence, transport=exporter)
        assert len(exporter._registered) == 2  # the image, and the checkpoint
        expected = content_of(cuda, sender, sequence, monkeypatch)
        arrived = import_sequence(receiver, manifest, transport=importer, cross_digest=b"clip")
        assert_same(expected, content_of(cuda, receiver, arrived, monkeypatch))
        assert exporter.drain(10)
        assert not exporter._registered


def test_an_import_that_fails_or_is_dropped_leaves_the_device_as_it_was(cuda, sockets):
    exporter, importer = sockets
    layers = MODELS["state"]
    sender, receiver = (make(layers, device=cuda.device, num_states=8, max_sequences=4) for _ in range(2))
    sequence = compute(cuda, sender, 40, 33, False)
    manifest = export_sequence(sender, sequence, transport=exporter, readers=5)
    running = start_import(receiver, manifest, transport=importer)
    running.cancel()
    with pytest.raises(ImportCancelled):
        running.result()
    assert receiver.num_sequences == 0
    receiver.check_invariants()
    arrived = import_sequence(receiver, manifest, transport=importer)
    assert arrived.num_computed_tokens == 33
    exporter.withdraw(manifest.export)
    assert exporter.drain(10)
    sender.check_invariants()


def test_memory_may_be_released_while_a_copy_is_exported(cuda, sockets):
    exporter, importer = sockets
    sender = make(MODELS["window"], device=cuda.device, memory_saver=True)
    receiver = make(MODELS["window"])
    sequence = compute(cuda, sender, 33, 33, False)
    manifest = export_sequence(sender, sequence, transport=exporter)
    sender.remove(sequence)
    sender.release_memory()
    assert import_sequence(receiver, manifest, transport=importer).num_computed_tokens == 33
    assert exporter.drain(10)
    sender.resume_memory()
