"""Copies by the copy engines move what block by block copies move, in few calls, and cross no border."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool
from pagecore.storage import HostPool
from pagecore.tiers.host.copies import rectangles as module
from pagecore.tiers.host.copies.rectangles import groups_of, rectangles

LAYERS, SIZE, BLOCKS = 3, 4, 24
SPECS = [AttentionSpec(2, 8, dtype="float16"), AttentionSpec(2, 8, 12, dtype="float16")]
NONE = np.empty(0, np.int64)


def make(spec, layout, seed=0):
    """Return planes of a cache and of a host pool with random bytes, and the memory of both."""
    own = KVPool(spec, LAYERS, BLOCKS, SIZE, layout)
    host = HostPool([(spec, LAYERS)], SIZE, num_blocks=[BLOCKS])
    memory = [*own.buffers, host.entries(0)]
    random = np.random.default_rng(seed)
    for tensor in memory:
        tensor.numpy()[...] = random.integers(0, 256, tensor.shape, np.uint8)
    names = [plane.name for plane in spec.planes]
    planes = [
        (own.plane(name, layer), host.kv_pools[0].plane(name, layer)) for layer in range(LAYERS) for name in names
    ]
    return planes, own.buffers, memory


def run(copies):
    for target, target_pitch, source, source_pitch, width, height in copies.tolist():
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def random_pairs(random, adjacent):
    """Return pairs of blocks: at random, or in runs of which some go on across random starts."""
    count = int(random.integers(1, BLOCKS))
    sources, targets = (1 + random.permutation(BLOCKS - 1)[:count] for _ in range(2))
    if adjacent:
        sources, targets = np.sort(sources), np.sort(targets)
    order = random.permutation(count)
    return np.stack([sources, targets], axis=1)[order].astype(np.int32)


@pytest.mark.parametrize("spec", SPECS, ids=["alike", "two sizes"])
@pytest.mark.parametrize("layout", ["layerwise", "blockwise"])
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("to_device", [False, True])
def test_the_copies_are_those_of_every_block_and_plane(monkeypatch, spec, layout, adjacent, to_device):
    random = np.random.default_rng(7)
    for seed in range(12):
        if seed == 6:
            monkeypatch.setattr(module, "PITCH_MAX", 1)
        planes, buffers, memory = make(spec, layout, seed)
        pairs = random_pairs(random, adjacent)
        borders = np.sort(random.permutation(BLOCKS)[: random.integers(4)])
        groups = groups_of(planes, buffers)
        before = [tensor.numpy().copy() for tensor in memory]
        for own, host in planes:
            source, target = (host, own) if to_device else (own, host)
            for one, other in pairs.tolist():
                target.numpy()[other] = source.numpy()[one]
        expected = [tensor.numpy().copy() for tensor in memory]
        for tensor, old in zip(memory, before, strict=True):
            tensor.numpy()[...] = old
        copies = rectangles(groups, pairs, borders, to_device=to_device)
        run(copies)
        for tensor, wanted in zip(memory, expected, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), wanted)
        assert len(copies) <= len(pairs) * len(planes)
        assert_within_chunks(copies, memory[-1], borders, to_device)


def assert_within_chunks(copies, entries, borders, to_device):
    """The host's side of each copy is between two borders."""
    address, pitch = (2, 3) if to_device else (0, 1)
    begin = copies[:, address] - entries.pointer
    end = begin + (copies[:, 5] - 1) * copies[:, pitch] + copies[:, 4]
    starts = borders * entries.strides[0]
    np.testing.assert_array_equal(
        np.searchsorted(starts, begin, side="right"), np.searchsorted(starts, end - 1, side="right")
    )


def test_scattered_blocks_take_one_copy_each_and_adjacent_ones_one_for_each_plane():
    planes, buffers, _ = make(SPECS[0], "layerwise")
    groups = groups_of(planes, buffers)
    assert [group.num_planes for group in groups] == [6]
    scattered = np.array([[1, 9], [3, 7], [5, 5], [7, 3]], np.int32)
    assert len(rectangles(groups, scattered, NONE, to_device=True)) == 4
    adjacent = np.stack([np.arange(1, 20), np.arange(2, 21)], axis=1).astype(np.int32)
    assert len(rectangles(groups, adjacent, NONE, to_device=True)) == 6
    assert len(rectangles(groups, adjacent[::-1], np.array([8]), to_device=False)) == 12


def test_each_run_takes_the_way_with_fewer_copies():
    planes, buffers, _ = make(SPECS[0], "layerwise")
    groups = groups_of(planes, buffers)
    short = [[1, 9], [3, 7], [4, 8]]
    long = [[10 + number, 12 + number] for number in range(9)]
    for pairs, count in ((short, 3), (long, 6), (short + long, 9), (long[:6], 6), (short * 0, 0)):
        copies = rectangles(groups, np.array(pairs, np.int32).reshape(-1, 2), NONE, to_device=True)
        assert copies.shape == (count, 6)


def test_planes_of_different_sizes_are_two_groups():
    planes, buffers, _ = make(SPECS[1], "layerwise")
    assert [group.num_planes for group in groups_of(planes, buffers)] == [3, 3]


def test_whole_blocks_of_a_blockwise_pool_are_single_runs():
    planes, buffers, _ = make(SPECS[0], "blockwise")
    (group,) = groups_of(planes, buffers)
    assert (group.num_planes, group.nbytes) == (1, 6 * SIZE * 2 * 8 * 2)
    adjacent = np.stack([np.arange(1, 20), np.arange(2, 21)], axis=1).astype(np.int32)
    assert len(rectangles([group], adjacent, NONE, to_device=True)) == 1


def test_planes_of_two_allocations_are_not_joined():
    """CUDA fails a copy that crosses from one allocation into another, even at equal distances."""
    planes, buffers, _ = make(SPECS[0], "layerwise")
    halves = [buffers[0][: buffers[0].nbytes // 2], buffers[0][buffers[0].nbytes // 2 :]]
    assert [group.num_planes for group in groups_of(planes, halves)] == [3, 3]
    assert [group.num_planes for group in groups_of(planes, [])] == [1] * 6


def test_a_group_ends_where_the_distance_of_rows_is_too_large(monkeypatch):
    planes, buffers, _ = make(SPECS[0], "layerwise")
    monkeypatch.setattr(module, "PITCH_MAX", planes[1][0].pointer - planes[0][0].pointer - 1)
    assert [group.num_planes for group in groups_of(planes, buffers)] == [1] * 6
