"""Tiers.clear: the prefixes of some media go, and everything else stays."""

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.tiers.disk import DiskStore
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

PROMPTS = [np.arange(first, first + 33, dtype=np.int32) for first in (0, 100)]
LENGTH = 32


@pytest.fixture
def disk(tmp_path):
    return lambda fingerprint: DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20)


def there(served, prompt, media):
    """Return the tokens that device, host and the stores of some media have of a prompt."""
    found = served.tiers.wait(served.tiers.lookup(prompt, deadline=20.0, media=media))
    found.release()
    return found.num_device_tokens, found.num_host_tokens, found.num_found_tokens


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("media", [(), ["GPU"], ["CPU"], ("GPU", "CPU"), {"DISK"}, ["GPU", "CPU", "DISK"]])
def test_only_the_media_that_are_named_are_cleared(disk, layers, media):
    with Served([disk], layers=layers, num_blocks=40, host_blocks=40) as served:
        for prompt in PROMPTS:
            served.serve(prompt)
        freed = served.tiers.clear(media)
        assert served.tiers.drain(20)
        each = len(PROMPTS) * LENGTH // BLOCK
        assert (freed > 0, freed >= each * len({"GPU", "CPU"} & set(media))) == (
            bool({"GPU", "CPU"} & set(media)),
            True,
        )
        left = {"GPU", "CPU", "DISK"} - set(media)
        for prompt in PROMPTS:
            device, host, found = there(served, prompt, ["DISK"])
            assert (device, host) == (LENGTH * ("GPU" in left), LENGTH * ("CPU" in left))
            assert found == LENGTH * bool(left)
        assert (served.tiers.stores[0].keys().shape[0] > 0) == ("DISK" in left)
        served.tiers.check_invariants()
        for prompt in PROMPTS:
            served.serve(prompt)  # which compares what is reused


def test_by_default_device_and_host_are_cleared(disk):
    with Served([disk], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        assert served.tiers.clear() == 2 * LENGTH // BLOCK
        assert there(served, PROMPTS[0], ()) == (0, 0, 0)
        assert served.serve(PROMPTS[0]).loaded_tokens == {"DISK": LENGTH}


def test_what_sequences_and_pins_use_stays(disk):
    with Served([disk], num_blocks=40, host_blocks=40) as served:
        for prompt in PROMPTS:
            served.serve(prompt)
        running = served.tiers.add_sequence(PROMPTS[0])
        with served.tiers.host.hold(PROMPTS[1]):
            served.tiers.clear(["GPU", "CPU", "DISK"])
            assert served.tiers.drain(20)
            assert [there(served, prompt, ["DISK"])[:2] for prompt in PROMPTS] == [(LENGTH, 0), (0, LENGTH)]
        served.verify(running, PROMPTS[0], None, LENGTH)
        served.cache.remove(running)


def test_requests_that_have_ended_pin_nothing(disk):
    with Served([disk]) as served:
        served.serve(PROMPTS[0])
        served.tiers.wait(served.tiers.request(PROMPTS[0]))  # not released
        served.tiers.clear()
        assert served.tiers.host.num_available == served.tiers.host.num_blocks[0] - 1
        assert served.tiers.host.stats().num_cached_blocks == 0


def test_what_is_being_saved_is_cleared_as_well(disk):
    with Served([disk]) as served:
        served.serve(PROMPTS[0])
        served.tiers.save([])
        served.tiers.clear(["DISK"])
        assert served.tiers.drain(20)
        assert len(served.tiers.stores[0].keys()) == 0


def test_a_store_that_cannot_be_cleared_is_refused_before_anything_is_evicted(disk):
    with Served([disk, MemoryStore()]) as served:
        served.serve(PROMPTS[0])
        with pytest.raises(UnsupportedOption, match="memory"):
            served.tiers.clear(["GPU", "CPU", "DISK", "EXTERNAL"])
        assert there(served, PROMPTS[0], ["DISK"]) == (LENGTH, LENGTH, LENGTH)
        served.tiers.clear(["DISK"])  # the other one is not named
        served.flush()
        assert len(served.tiers.stores[0].keys()) == 0


@pytest.mark.parametrize("media", ["GPU", None, 3, ["TAPE"], [7]])
def test_other_media_are_refused(media):
    with Served() as served:
        served.serve(PROMPTS[0])
        with pytest.raises(UnsupportedOption, match="media"):
            served.tiers.clear(media)
        assert there(served, PROMPTS[0], ()) == (LENGTH, LENGTH, LENGTH)


def test_closed_tiers_are_refused():
    served = Served()
    served.close()
    with pytest.raises(UnsupportedOption, match="closed"):
        served.tiers.clear()
