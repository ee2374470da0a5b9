"""Hand-overs between caches of random layers, block sizes and layouts: every byte arrives, and nothing is leaked."""

import random
import threading

import numpy as np
import pytest

from pagecore import AttentionSpec, KVLayout, LatentSpec, OutOfBlocks, OutOfRows, StateSpec, UnsupportedOption
from pagecore.cache.parts import parts_of
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from tests.cache.hybrid_models import CONV, TEMPORAL
from tests.faults import is_full
from tests.tiers.handover.pairs import advance, assert_same, content, fill, make

SEEDS = 400 if is_full() else 30
FORMATS = ["int8_token", "int4_token", "float8_token", "float8_e4m3fn", "fp4_block16", "mxfp8"]


def attention(draw):
    """Return a spec of one of the kinds of layers that store tokens."""
    kind = draw.choice(["full", "window", "sinks", "chunk", "latent", "format", "bounds"])
    if kind == "latent":
        return LatentSpec(16, draw.choice([0, 8]), 2, scale=0.25, dtype=draw.choice(["float32", "bfloat16"]))
    if kind == "format":
        rotations = {name: draw.choice([None, "hadamard"]) for name in ("key_rotation", "value_rotation")}
        formats = {name: draw.choice(FORMATS) for name in ("format", "value_format")}
        return AttentionSpec(2, 32, dtype="bfloat16", **formats, **rotations)
    if kind == "bounds":
        return AttentionSpec(2, 8, dtype="float32", key_bounds=True)
    limits = {"chunk": draw.randint(1, 20)} if kind == "chunk" else {"window": draw.randint(1, 20)}
    if kind == "sinks":
        limits["sink_tokens"] = draw.randint(1, 9)
    return AttentionSpec(
        draw.choice([1, 2]), 8, draw.choice([8, 4]), dtype="float16", **({} if kind == "full" else limits)
    )


def layers_of(draw):
    layers = [attention(draw) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.25:
        rules = {"group_size": 16, "block_size": 16, "residual": draw.choice([0, 5, 16])}
        rules |= draw.choice([{}, {"window": draw.randint(1, 40)}, {"chunk": 24}, {"window": 9, "sink_tokens": 20}])
        layers.append(AttentionSpec(2, 16, 32, dtype="float16", format=draw.choice(["kivi2", "kivi4"]), **rules))
    if draw.random() < 0.4:
        chunk = draw.choice([1, 4, 8])
        rules = {"chunk": chunk, "interval": chunk * draw.randint(1, 3), "in_place": draw.random() < 0.5}
        checkpoint = draw.choice([None, None, "int8"])
        layers.insert(draw.randint(0, len(layers)), StateSpec((CONV, TEMPORAL), checkpoint_format=checkpoint, **rules))
    return layers


def is_cut_at_blocks(spec):
    """Return True for layers whose blocks both sides must have of one size."""
    limited = getattr(spec, "window", None) is not None or getattr(spec, "chunk", None) is not None
    return limited or any(plane.per == "block" for plane in spec.planes)


def options_of(draw, layers):
    options = {"num_blocks": draw.choice([40, 90]), "max_sequences": draw.choice([3, 8])}
    if any(isinstance(spec, StateSpec) for spec in layers):
        options["num_states"] = draw.choice([8, 20])
    if any(getattr(spec, "checkpoint_format", None) for spec in layers):
        options["num_checkpoints"] = draw.choice([3, 9])
    if draw.random() < 0.3:
        options["prefix_cache"] = False
    return options


def pair_of_caches(draw):
    """Return a cache that exports and one that imports; their blocks, layouts and sizes may differ."""
    layers = layers_of(draw)
    size = draw.choice([1, 2, 4, 8, 16])
    if any(getattr(spec, "sealing", None) for spec in layers):
        size = 16
    other = size if any(is_cut_at_blocks(spec) for spec in layers) else draw.choice([1, 4, 8, 16])
    caches = []
    for number, block_size in enumerate((size, other)):
        options = options_of(draw, layers) | {"block_size": block_size}
        if block_size < 8:
            options["num_blocks"] *= 4
        if draw.random() < 0.5 and not any(is_cut_at_blocks(spec) for spec in layers):
            options["layout"] = draw.choice(["blockwise", KVLayout("LBNCHD"), KVLayout("BLHNCD")])
        try:
            caches.append(make(layers, **options))
        except UnsupportedOption as error:
            assert "misaligns plane" in str(error)  # noqa: PT017
            caches.append(make(layers, **options | {"layout": None}))
        fill(caches[-1], number)
    return caches


def grow(cache, sequence, count, token):
    """Add tokens to a sequence of which all are computed, and compute them."""
    cache.append_tokens([sequence], [list(range(token, token + count))])
    advance(cache, sequence, sequence.num_tokens - sequence.num_computed_tokens)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layers_arrive(sockets, seed):
    exporter, importer = sockets
    draw = random.Random(seed)
    here, there = pair_of_caches(draw)
    sequences, arrived = [], []
    for number in range(draw.randint(1, 3)):
        try:
            count = draw.randint(1, 70)
            sequence = here.add_sequence(np.arange(count) + 1000 * number)
            sequences.append(sequence)
            advance(here, sequence, draw.randint(1, count - sequence.num_computed_tokens))
            for turn in range(draw.randint(1, 3)):
                manifest = export_sequence(here, sequence, transport=exporter)
                try:
                    arrived.append(import_sequence(there, manifest.encode(), transport=importer))
                except (OutOfBlocks, OutOfRows):
                    exporter.withdraw(manifest.export)
                    break
                theirs, mine = content(here, sequence), content(there, arrived[-1])
                if arrived[-1].num_sealed_tokens > sequence.num_sealed_tokens:  # of a prefix that the importer had
                    assert arrived[-1].num_cached_tokens == arrived[-1].num_sealed_tokens
                    sealing = here.num_groups - 2, here.num_groups - 1
                    theirs, mine = (
                        {key: each[key] for key in each if key[0] not in sealing} for each in (theirs, mine)
                    )
                assert_same(theirs, mine)
                assert arrived[-1].tokens.tolist() == sequence.tokens.tolist()
                there.check_invariants()
                if sequence.num_computed_tokens < sequence.num_tokens:
                    advance(here, sequence, sequence.num_tokens - sequence.num_computed_tokens)
                grow(here, sequence, draw.randint(1, 20), 7000 + 100 * turn)
                if draw.random() < 0.4:
                    there.remove(arrived.pop())
        except (OutOfBlocks, OutOfRows):
            break
    for sequence in arrived[:1]:
        if sequence.num_computed_tokens == sequence.num_tokens:
            grow(there, sequence, 1, 9000)
    assert exporter.drain(10)
    for cache, held in ((here, sequences), (there, arrived)):
        for sequence in held:
            cache.remove(sequence)
        cache.clear_prefix_cache()
        cache.check_invariants()
        assert cache.num_sequences == 0
        assert all(pool.num_used == 0 for pool in parts_of(cache).block_pools)


def test_an_offer_is_left_until_its_rows_are_given_back(sockets):
    exporter, _ = sockets
    cache = make()
    sequence = cache.add_sequence(np.arange(20))
    advance(cache, sequence, 20)
    manifest = export_sequence(cache, sequence, transport=exporter)
    begun, may_end = threading.Event(), threading.Event()
    exporter._server._offers[manifest.export].on_release = lambda: (begun.set(), may_end.wait())
    withdrawing = threading.Thread(target=exporter.withdraw, args=(manifest.export,))
    withdrawing.start()
    begun.wait()
    assert (exporter.num_offers, cache.num_sequences) == (1, 2)
    assert not exporter.drain(0.0)
    may_end.set()
    withdrawing.join()
    assert exporter.drain(10)
    assert cache.num_sequences == 1


def test_rows_are_given_back_though_memory_cannot_be_unregistered(sockets):
    exporter, _ = sockets
    cache = make()
    sequence = cache.add_sequence(np.arange(20))
    advance(cache, sequence, 20)
    manifest = export_sequence(cache, sequence, transport=exporter)

    def fail() -> None:
        raise OSError("cannot unregister")

    exporter._server._offers[manifest.export].on_release = fail
    with pytest.raises(OSError, match="cannot unregister"):
        exporter.withdraw(manifest.export)
    assert exporter.drain(10)
    assert (exporter.num_offers, cache.num_sequences) == (0, 1)
