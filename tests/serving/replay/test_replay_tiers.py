"""Replay with tiers: hits by medium against a dictionary and against a larger device, and real bytes on a disk."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.replay import replay
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.simulated_store import SimulatedStore
from pagecore.serving.replay.tier_options import parse_bandwidth, parse_place
from pagecore.serving.replay.trace import HASH_BLOCK
from pagecore.serving.tables import replay_rows
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from tests.faults import is_full
from tests.models.hybrids import HYBRIDS
from tests.tiers.blocks import random_keys, wait
from tests.together import together

BLOCK_BYTES = 131072 * HASH_BLOCK


def write_chats(path, *, requests=60, longest=6, seed=3):
    """Write a trace in which most requests continue an earlier one."""
    random = np.random.default_rng(seed)
    known, lines, fresh = [[]], [], 0
    for number in range(requests):
        earlier = known[random.integers(len(known))] if random.random() < 0.8 else []
        ids = [*earlier, *range(fresh, fresh + int(random.integers(1, 3)))][:longest]
        fresh += 2
        known.append(ids)
        length = len(ids) * HASH_BLOCK + 1
        lines.append({"timestamp": number, "input_length": length, "output_length": 0, "hash_ids": [*ids, fresh]})
        fresh += 1
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def chats(tmp_path):
    return write_chats(tmp_path / "chats.jsonl")


def run(path, **options):
    return replay(path, ReplayOptions(prefill_only=True, block_size=HASH_BLOCK, max_running=1, **options))


def test_a_large_host_finds_everything_that_an_unbounded_device_finds(chats):
    small = run(chats, blocks=9)
    tiered = run(chats, blocks=9, host="64GiB")
    unbounded = run(chats, blocks="unbounded")
    assert small.prefix_hit_tokens < tiered.prefix_hit_tokens == unbounded.prefix_hit_tokens
    hits = tiered.tiers.hit_tokens
    assert hits["GPU"] > 0
    assert hits["CPU"] > 0
    assert sum(hits.values()) == tiered.prefix_hit_tokens
    assert tiered.tiers.read_bytes == {"CPU": hits["CPU"] // HASH_BLOCK * BLOCK_BYTES}


def test_hits_by_medium_count_each_admission_once_although_waiting_prompts_are_added_repeatedly(chats):
    options = ReplayOptions(
        prefill_only=True, block_size=HASH_BLOCK, blocks=13, host=40 * BLOCK_BYTES, disk="unbounded", max_running=8
    )
    report = replay(chats, options)
    hits = report.tiers.hit_tokens
    assert sum(hits.values()) == report.saved_prefill_tokens
    assert min(hits.values()) > 0


@pytest.mark.parametrize("stores", [{}, {"disk": 4 * BLOCK_BYTES}], ids=["host", "disk"])
@pytest.mark.parametrize("seed", range(4))
def test_hits_by_medium_leave_out_what_was_evicted_before_its_prompt_ran(tmp_path, seed, stores):
    trace = write_chats(tmp_path / "crowd.jsonl", requests=30, longest=3, seed=seed)
    options = ReplayOptions(block_size=HASH_BLOCK, blocks=5, host=9 * BLOCK_BYTES, max_running=64, **stores)
    report = replay(trace, options)
    assert sum(report.tiers.hit_tokens.values()) == report.saved_prefill_tokens
    assert min(report.tiers.hit_tokens.values()) >= 0


@pytest.mark.parametrize("medium", ["disk", "remote"])
def test_an_unbounded_store_finds_everything_too(chats, medium):
    host = 10 * BLOCK_BYTES
    report = run(chats, blocks=9, host=host, **{medium: "unbounded"}, bandwidth=[f"{medium}=2", "host=50"])
    assert report.prefix_hit_tokens == run(chats, blocks="unbounded").prefix_hit_tokens
    name = {"disk": "DISK", "remote": "EXTERNAL"}[medium]
    tiers = report.tiers
    assert tiers.hit_tokens[name] > 0
    assert sum(tiers.hit_tokens.values()) == report.prefix_hit_tokens
    assert tiers.modelled_s[name] == pytest.approx(tiers.read_bytes[name] / 2e9)
    assert tiers.read_bytes[name] % BLOCK_BYTES == 0
    assert tiers.failed_entries == tiers.late_requests == 0
    rows = dict(replay_rows(report))
    assert name in rows["hits by medium"]
    assert "given bandwidths" in rows["time of reads"]
    json.dumps(report.as_json())


@pytest.mark.slow
def test_a_bounded_disk_finds_less_than_an_unbounded_one(chats):
    options = {"blocks": 9, "host": 10 * BLOCK_BYTES}
    none, some, every = (
        run(chats, **options, disk=disk).prefix_hit_tokens for disk in (None, 40 * BLOCK_BYTES, "unbounded")
    )
    assert none < some < every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "disk", "seed"), [(10, 10, 0), (20, 10, 1), (10, 30, 1), *([(20, 40, 0)] if is_full() else [])]
)
def test_device_and_the_larger_of_host_and_disk_hit_like_one_cache_of_both_sizes(tmp_path, host, disk, seed):
    trace = write_chats(tmp_path / "chats.jsonl", requests=140, seed=seed)
    sizes = {"host": host * BLOCK_BYTES, "disk": disk * BLOCK_BYTES}
    found = run(trace, blocks=13, **sizes).prefix_hit_tokens
    one = run(trace, blocks=12 + max(host, disk)).prefix_hit_tokens
    assert found >= run(trace, blocks=13, host=sizes["host"]).prefix_hit_tokens
    assert found >= 0.95 * one


@pytest.mark.slow
def test_real_bytes_pass_through_a_disk_and_are_attended(tmp_path):
    path = write_chats(tmp_path / "short.jsonl", requests=40, longest=3)
    options = {"blocks": 5, "host": 10 * BLOCK_BYTES}
    report = run(path, **options, attend=True, disk=str(tmp_path / "disk"))
    assert report.passed
    assert report.rows_checked > 0
    assert report.tiers.hit_tokens["DISK"] > 0
    # Blocks that the disk is still reading are pinned, so that a small host takes fewer.
    assert report.prefix_hit_tokens <= run(path, **options, disk="unbounded").prefix_hit_tokens


def test_real_bytes_pass_through_an_object_store(tmp_path):
    pytest.importorskip("obstore")
    path = write_chats(tmp_path / "short.jsonl", requests=12, longest=3)
    (tmp_path / "objects").mkdir()
    url = f"file://{tmp_path}/objects"
    report = run(path, blocks=6, host=6 * BLOCK_BYTES, attend=True, remote=url)
    assert report.passed
    assert report.tiers.hit_tokens["EXTERNAL"] > 0


@together(
    ("options", "error", "words"),
    [
        ({"disk": "1TiB"}, UnsupportedOption, "give host, too"),
        ({"bandwidth": ["disk=2"]}, UnsupportedOption, "give host, too"),
        ({"host": "1GiB", "evict": "none"}, UnsupportedOption, "a tier keeps prefixes"),
        ({"host": "1GiB", "disk": "folder"}, UnsupportedOption, "add attend"),
        ({"host": "1GiB", "remote": "redis://localhost"}, UnsupportedOption, "add attend"),
        ({"host": "1GiB", "disk": "1TiB", "attend": True}, UnsupportedOption, "give a folder"),
        ({"host": "1GiB", "disk": "0GiB"}, ShapeError, "above 0"),
        ({"host": "1GiB", "disk": ""}, UnsupportedOption, "expected a folder"),
        ({"host": "1GiB", "bandwidth": ["disk"]}, UnsupportedOption, "disk=2.5"),
        ({"host": "1GiB", "bandwidth": {"disc": 1.0}}, UnsupportedOption, "media are"),
        ({"host": "1GiB", "bandwidth": {"disk": 0.0}}, ShapeError, "above 0"),
        ({"host": "1GiB", "bandwidth": {"host": 1e-308}}, ShapeError, "above 0: from 1e-06"),
        ({"host": "1GiB", "bandwidth": ["host=1", "host=2.5"]}, UnsupportedOption, "twice, as 1 and 2.5 GB/s"),
    ],
)
def test_refused_options(options, error, words):
    with pytest.raises(error, match=words):
        ReplayOptions(**options)


def test_places_and_bandwidths():
    assert parse_place("disk", "1.5TiB", False).nbytes == 3 << 39
    assert parse_place("disk", 7, False).nbytes == 7
    assert parse_place("remote", "unbounded", False).nbytes is None
    assert parse_place("remote", "s3://bucket", True).target == "s3://bucket"
    assert parse_bandwidth({"host": 50}) == {"host": 50e9}


def test_a_simulated_store_keeps_the_entries_used_last_and_those_held():
    store = SimulatedStore("DISK", 3000)
    try:
        keys = random_keys(4)
        pieces = np.array([[0, 1000]] * 4, np.uint64)
        assert wait(store, store.submit_store(keys[:3], pieces[:3])).ok.all()
        assert wait(store, store.submit_lookup(keys[:1])).ok.all()
        assert wait(store, store.submit_store(keys[3:], pieces[3:])).ok.all()
        # A batch uses its keys from the last to the first.
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [True, True, False, True]
        big = np.array([[0, 1500]], np.uint64)
        assert wait(store, store.submit_store(keys[2:3], big)).ok.tolist() == [False]
        assert wait(store, store.submit_load(keys[[1, 3]], pieces[2:])).ok.all()
        assert store.stats().num_held == 2
        store.unlock(keys[:1])
        store.unlock(keys[:1])
        assert store.stats().num_held == 0
        assert store.stats().bytes_loaded == 2000
    finally:
        store.close()
        store.close()


def test_a_batch_of_a_simulated_store_evicts_none_of_its_own_entries():
    store = SimulatedStore("DISK", 3000)
    try:
        keys = random_keys(6)
        pieces = np.array([[0, 1000]] * 6, np.uint64)
        assert wait(store, store.submit_store(keys[4:5], pieces[:1])).ok.all()
        assert wait(store, store.submit_store(keys[:2], pieces[:2])).ok.all()
        assert wait(store, store.submit_store(keys[[2, 4, 3, 5]], pieces[:4])).ok.tolist() == [True, True, True, False]
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [False, False, True, True, True, False]
    finally:
        store.close()


def test_a_simulated_disk_evicts_a_prefix_from_its_end():
    fingerprint = Fingerprint(model="m", lanes=("lane",), payload_bytes=(1000,), block_size=4)
    store = SimulatedStore("DISK", 4000, fingerprint)
    try:
        chain = lane_keys(content_chain(fingerprint, np.arange(24)), 0)
        other = lane_keys(content_chain(fingerprint, np.arange(100, 108)), 0)
        pieces = np.array([[0, 1000]] * 6, np.uint64)
        none = chain[:0]
        assert wait(store, store.submit_store(chain[:3], pieces[:3], before=none)).ok.all()
        assert wait(store, store.submit_store(chain[3:5], pieces[:2], before=chain[2:3])).ok.tolist() == [True, False]
        assert wait(store, store.submit_store(chain[5:], pieces[:1], before=chain[4:5])).ok.tolist() == [False]
        assert wait(store, store.submit_store(other, pieces[:2], before=none)).ok.all()
        assert wait(store, store.submit_lookup(chain)).ok.tolist() == [True] * 2 + [False] * 4
    finally:
        store.close()


def test_the_page_about_the_simulator_describes_every_row(chats):
    """The rows about states are on the page about hybrid models."""
    text = (Path(__file__).parents[3] / "docs/simulator.md").read_text()
    described = {name for cell in re.findall(r"^\| ([^|`]+) \|", text, re.MULTILINE) for name in cell.split(", ")}
    report = run(chats, blocks=9, host=40 * BLOCK_BYTES, disk="unbounded", bandwidth=["host=1"], swap_memory="1GiB")
    checked = replace(report, requests_refused=1, rows_attended=1, rows_checked=1, max_relative_error=0.0)
    checked = replace(checked, tiers=replace(report.tiers, failed_entries=1))
    assert dict(replay_rows(checked)).keys() <= described


@pytest.mark.slow
def test_another_seed_finds_nothing_in_the_same_folder(tmp_path):
    path = write_chats(tmp_path / "short.jsonl", requests=12, longest=3)
    options = {"blocks": 5, "host": 10 * BLOCK_BYTES, "disk": str(tmp_path / "disk"), "attend": True}
    assert run(path, **options).passed
    again, other = run(path, **options), run(path, **options, seed=1)
    assert again.passed
    assert other.passed
    assert again.tiers.hit_tokens["DISK"] > other.tiers.hit_tokens.get("DISK", 0)


@pytest.mark.parametrize("value", ["0", "8XiB", 5])
def test_errors_of_sizes_name_the_option(value):
    with pytest.raises((ShapeError, NotEnoughMemory), match=r"^host is"):
        ReplayOptions(host=value)


@pytest.mark.parametrize("name", ["mamba-2.8b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("store", [{}, {"disk": "unbounded"}], ids=["host", "disk"])
def test_states_come_back_and_each_counts_its_own_bytes(chats, name, store):
    model = HYBRIDS[name]
    unbounded = run(chats, model=model, blocks="unbounded")
    each = unbounded.states.bytes_per_state
    sizes = {"memory": 12 * each} if name == "mamba-2.8b" else {"memory": "6GiB"}
    alone = run(chats, model=model, **sizes)
    tiered = run(chats, model=model, **sizes, host=200 * each, **store)
    assert alone.prefix_hit_tokens < tiered.prefix_hit_tokens == unbounded.prefix_hit_tokens
    tiers = tiered.tiers
    assert sum(tiers.hit_tokens.values()) == tiered.prefix_hit_tokens
    if name == "mamba-2.8b":
        assert (tiers.host_blocks, tiers.host_states) == (0, 200)
        for moved in (tiers.read_bytes, tiers.written_bytes):
            assert all(nbytes % each == 0 for nbytes in moved.values())
        assert tiers.read_bytes["CPU"] // each <= 60
    assert "states (0 evicted)" in dict(replay_rows(tiered))["host tier"]
