"""bench/index/prefix.py: the load, the ring, the plain dictionary, the peers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import cli, peers
from bench.harness import machine
from bench.harness.runner import Bench
from bench.index import prefix
from bench.index.prefix_load import LENGTH, SHARED, CacheFlush, Load
from bench.index.prefix_sides import ChainedDict, Ours, check_found

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
HOME = Path(os.environ.get("PAGECORE_PEERS", "~/.cache/pagecore-peers")).expanduser()
SIDES = (Ours, ChainedDict)


def small_load(block_size=16, num_sequences=24):
    return Load(num_sequences, block_size, group=6, made_up=8)


@pytest.mark.parametrize("block_size", prefix.BLOCK_SIZES)
def test_sequences_of_a_group_share_their_first_half_and_nothing_else(block_size):
    load = small_load(block_size)
    tokens, blocks = load.keys["hit"], load.blocks
    assert tokens.shape == (24, LENGTH)
    assert blocks.shape == (24, LENGTH // block_size)
    half = SHARED // block_size
    for i in range(24):
        for j in range(i):
            same_group = i % load.num_groups == j % load.num_groups
            same = tokens[i] == tokens[j]
            assert int(np.argmin(same)) == (SHARED if same_group else 0)
            assert len(np.intersect1d(blocks[i], blocks[j])) == (half if same_group else 0)
    assert sorted(set(blocks.ravel().tolist())) == list(range(1, load.num_blocks + 1))


def test_no_two_groups_begin_alike_by_chance():
    load = Load(1000, 64, group=1, made_up=1)
    assert len(np.unique(load.keys["hit"][:, 0])) == 1000


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block_size", prefix.BLOCK_SIZES)
def test_keys_are_found_to_the_length_of_their_kind(side, block_size):
    cache = side(small_load(block_size))
    for kind in ("hit", "half", "miss"):
        check_found(cache, kind, cache.keys[kind])
    with pytest.raises(AssertionError):
        check_found(cache, "hit", cache.keys["half"])


@pytest.mark.parametrize("block_size", prefix.BLOCK_SIZES)
def test_the_dictionary_evicts_the_same_blocks_in_the_same_order_as_the_tree(block_size):
    ours, theirs = (side(small_load(block_size)) for side in SIDES)
    for turn in range(12):
        gone = [side.evict_leaves(3) if turn % 2 else [side.evict_at_once(3)] for side in (ours, theirs)]
        for blocks, other in zip(*gone, strict=True):
            np.testing.assert_array_equal(blocks, other)
        for side in (ours, theirs):
            side.note_missing(3)
            side.insert_missing()
    assert sorted(ours.drain().tolist()) == sorted(theirs.drain()) == list(range(1, ours.load.num_blocks + 1))


@pytest.mark.parametrize("side", SIDES)
def test_the_ring_evicts_the_oldest_and_brings_them_back(side):
    cache = side(small_load())
    for start in range(0, 60, 5):
        cache.make_room(5)
        assert cache.missing == [number % 24 for number in range(start, start + 5)]
        for number in range(24):
            check_found(cache, "half" if number in cache.missing else "hit", [cache.keys["hit"][number]])
        cache.insert_missing()
        check_found(cache, "hit", cache.keys["hit"])


@pytest.mark.parametrize("side", SIDES)
def test_a_drained_cache_finds_nothing_and_can_be_filled_again(side):
    cache = side(small_load())
    cache.make_room(5)
    cache.insert_missing()
    assert len(cache.drain()) == cache.load.num_blocks
    check_found(cache, "miss", cache.keys["hit"])
    cache.fill()
    check_found(cache, "hit", cache.keys["hit"])
    assert cache.oldest == 0


def test_a_second_lock_and_unlock_leaves_a_path_locked():
    cache = Ours(small_load())
    held = cache.hold(cache.keys["hit"][:2])
    pinned = cache.tree.protected("full")
    cache.lock_again(held)
    cache.match_and_lock(cache.keys["hit"])
    assert cache.tree.protected("full") == pinned == LENGTH // 16 * 2
    cache.release(held)
    assert cache.tree.protected("full") == 0
    assert cache.tree.num_receipts == 0


def test_the_dictionarys_pins_are_undone():
    cache = ChainedDict(small_load())
    held = cache.hold(cache.keys["hit"][:4])
    assert sum(cache.pins) == 4 * LENGTH // 16
    cache.lock_again(held)
    cache.match_and_lock(cache.keys["hit"])
    cache.release(held)
    assert set(cache.pins) == {0}


def test_insert_all_equals_single_inserts():
    cache = Ours(small_load())
    cache.make_room(7)
    cache.insert_all()
    check_found(cache, "hit", cache.keys["hit"])
    assert cache.tree.evictable("full") == cache.load.num_blocks


def test_warm_keys_repeat_and_cold_keys_repeat_only_after_all_others():
    warm, cold = (prefix._Keys(list(range(100)), 40, warm) for warm in (True, False))
    seen = []
    for _ in range(5):
        warm.take()
        cold.take()
        assert len(warm.now) == len(cold.now) == 40
        assert set(warm.now) == set(range(prefix.WARM_KEYS))
        seen += cold.now
    assert sorted(seen[:100]) == sorted(seen[100:]) == list(range(100))
    assert seen[:100] != sorted(seen[:100])


def test_the_flush_reads_more_than_the_caches_hold():
    assert CacheFlush()._memory.nbytes >= max(2**26, 4 * machine.last_level_cache())
    CacheFlush(smoke=True)()


def test_the_last_level_cache_is_the_largest_data_cache(monkeypatch, tmp_path):
    for index, (kind, size) in enumerate([("Data", "32K"), ("Unified", "2048K"), ("Instruction", "4096K")]):
        folder = tmp_path / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in {"level": str(index), "type": kind, "size": size}.items():
            (folder / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "CPU", tmp_path)
    assert machine.last_level_cache() == 2 * 2**20
    monkeypatch.setattr(machine, "CPU", tmp_path / "nothing")
    assert machine.last_level_cache() == 0


def figures_of(*sides):
    bench = Bench(kind="smoke", write=lambda _line: None)
    return prefix._Figures(bench, sides[0].load, list(sides), CacheFlush(smoke=True))


def test_a_figure_is_refused_if_an_eviction_takes_the_wrong_leaves():
    load = small_load()
    ours, theirs = Ours(load), ChainedDict(load)
    figures_of(ours, theirs).changes()
    theirs.oldest += 1
    with pytest.raises(AssertionError):
        figures_of(ours, theirs).changes()


@pytest.mark.parametrize("kind", ["hit", "half", "miss"])
def test_a_figure_is_refused_if_a_lookup_finds_something_else(kind):
    load = small_load()
    ours, theirs = Ours(load), ChainedDict(load)
    theirs.keys[kind] = theirs.keys["miss" if kind == "half" else "half"]
    with pytest.raises(AssertionError, match=kind):
        figures_of(ours, theirs).lookups()


def test_each_load_has_every_figure_warm_and_cold(tmp_path):
    path = tmp_path / "out.json"
    assert cli.main(["prefix", "--smoke", "--json", str(path)]) == 0
    names = [figure["name"] for figure in json.loads(path.read_text())["results"]["prefix"]["figures"]]
    for block_size in prefix.BLOCK_SIZES:
        mine = [name for name in names if f"block {block_size}:" in name]
        for what in ("insert", "evict a leaf", "match, hit", "match, half", "match, miss", "lock + unlock"):
            for temperature in ("warm", "cold"):
                assert sum(f": {what}, {temperature}" in name for name in mine) == 1, (what, temperature)
        for what in ("evict 16,384 tokens", "drain", "insert_all", "match_all"):
            assert sum(what in name for name in mine) == 1, what


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "folder"), [("sglang", "sglang-0.5.23"), ("vllm", "vllm-0.33.0")])
def test_a_peers_prefix_cache_is_a_control_if_it_is_installed(peer, folder, tmp_path):
    if not (HOME / folder).is_dir():
        pytest.skip(f"{peer} is not in {HOME}")
    path = tmp_path / "out.json"
    ran = run_bench("prefix", "--peer", peer, "--smoke", "--json", path)
    if ran.returncode == 2:
        pytest.skip(f"{peer} cannot be imported here")
    assert ran.returncode == 0, ran.stderr
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["prefix"]
    assert any(peer in control.lower() for figure in results["prefix"]["figures"] for control in figure["controls"])


@pytest.mark.parametrize(
    ("names", "loaded", "sections"),
    [
        (["prefix"], ["vllm_prefix"], []),
        (["prefix", "index"], ["vllm_prefix", "vllm"], ["peer vllm"]),
        (["index"], ["vllm"], ["peer vllm"]),
        ([], ["vllm"], ["peer vllm"]),
    ],
)
def test_for_prefix_alone_a_peer_has_no_section_of_its_own(names, loaded, sections, monkeypatch):
    seen = []
    for name in ("vllm", "vllm_prefix"):
        fake = SimpleNamespace(load=lambda name=name: seen.append(name))
        monkeypatch.setitem(sys.modules, f"bench.peers.{name}", fake)
    options = argparse.Namespace(names=names, peer=["vllm", "vllm"])
    assert list(cli._load_peers(options)) == sections
    assert seen == loaded


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_a_peer_that_is_missing_is_refused_with_its_recipe_before_anything_runs(peer, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(peers, "HOME", tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["prefix", "--peer", peer])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "pip download" in shown.err
    assert shown.out == ""


def run_bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
