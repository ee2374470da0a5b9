"""A batch ends its step: by commit, by abandon, by an exception in its context, or by being collected."""

import gc

import numpy as np
import pytest

from pagecore import InvalidSequence
from pagecore.errors import DeviceError, OutOfBlocks
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.prefixes import ALIKE
from tests.together import together

pytestmark = pytest.mark.slow

DEVICES = ["cpu", "none"]
ZEROS = np.zeros((8, 2, 8), np.float32)


class Failure(Exception):
    """The error of a forward pass in these tests."""


def end_and_fail(end, batch):
    end(batch)
    raise Failure


def used(cache):
    return cache.stats().num_used_blocks


# -- collected ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [SPEC, [SPEC, WINDOWED]], ids=["one group", "two groups"])
def test_a_lost_batch_gives_up_its_step(layers, device):
    cache = make(layers, device=device)
    sequence = cache.add_sequence(ALIKE[:9])
    before = used(cache)
    cache.prepare([sequence], 9)  # the batch is not kept
    gc.collect()
    assert used(cache) == before
    assert cache.num_available == 16
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (9, 0)
    with cache.prepare([sequence], 9) as batch:
        cache.commit(batch)
    assert sequence.num_computed_tokens == 9
    cache.check_invariants()


NEXT_CALLS = {
    "prepare": lambda cache, sequence: cache.prepare([sequence], 9),
    "try_prepare": lambda cache, sequence: cache.try_prepare([sequence], 9),
    "shortage": lambda cache, sequence: cache.shortage([sequence], 9),
    "fork": lambda cache, sequence: cache.fork(sequence),
    "reorder": lambda cache, sequence: cache.reorder([sequence], [sequence]),
    "truncate": lambda cache, sequence: cache.truncate([sequence], 0),
    "remove": lambda cache, sequence: cache.remove(sequence),
    "append_tokens": lambda cache, sequence: cache.append_tokens([sequence], [1]),
    "check_invariants": lambda cache, sequence: cache.check_invariants(),
}


@together("call", NEXT_CALLS)
def test_a_lost_batch_blocks_no_call(call):
    cache = make(num_blocks=4, max_tokens_per_sequence=12)
    sequence = cache.add_sequence(ALIKE[:9])
    cache.prepare([sequence], 9)  # takes every block of the cache
    gc.collect()
    kept = NEXT_CALLS[call](cache, sequence)
    del kept
    gc.collect()
    assert cache.num_available == 3
    cache.check_invariants()


def test_the_blocks_of_a_lost_batch_serve_other_sequences():
    cache = make(num_blocks=4, max_tokens_per_sequence=12)
    cache.prepare([cache.add_sequence(ALIKE[:12])], 12)
    gc.collect()
    other = cache.add_sequence(range(50, 62))
    advance(cache, [other], 12)
    assert other.num_computed_tokens == 12
    with pytest.raises(OutOfBlocks):
        cache.prepare([cache.add_sequence([1])], 1)


def test_a_lost_batch_in_a_cycle_gives_up_its_step():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:9])
    batch = cache.prepare([sequence], 9)
    batch.cycle = batch
    del batch
    gc.collect()
    assert cache.num_available == 16
    advance(cache, [sequence], 9)
    cache.check_invariants()


def test_a_lost_batch_of_make_batch_gives_up_its_step():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:9])
    batch = cache.make_batch(2, 16)
    cache.prepare([sequence], 9, out=batch)
    del batch
    gc.collect()
    advance(cache, [sequence], 9)
    assert sequence.num_computed_tokens == 9


def test_a_lost_batch_leaves_what_its_step_copied_to_the_sequence():
    cache = make(prefix_cache=False)
    parent = cache.add_sequence(ALIKE[:6])
    advance(cache, [parent], 6)
    child = cache.fork(parent)
    cache.append_tokens([child], [9])
    cache.prepare([child], 1)  # copies the second block
    gc.collect()
    assert (used(cache), child.num_computed_tokens) == (3, 6)
    cache.append_tokens([parent], [8])
    advance(cache, [parent, child], 1)
    assert cache.stats().num_copied_blocks == 1
    cache.check_invariants()


def test_a_lost_batch_that_was_committed_changes_nothing():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:9])
    cache.commit(cache.prepare([sequence], 9))
    gc.collect()
    assert (sequence.num_computed_tokens, used(cache)) == (9, 3)
    cache.check_invariants()


def test_one_lost_batch_gives_up_no_other_step():
    cache = make()
    first, second = cache.add_sequence(ALIKE[:9]), cache.add_sequence(range(50, 55))
    cache.prepare([first], 9)
    with cache.prepare([second], 5) as kept:
        gc.collect()
        assert cache.num_available == 14
        cache.commit(kept)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 5)


def test_views_of_a_lost_batch_stay_readable():
    cache = make()
    batch = cache.prepare([cache.add_sequence(ALIKE[:9])], 9)
    slots, ids = np.asarray(batch.group(0).slot_mapping), np.asarray(batch.token_ids)
    del batch
    gc.collect()
    cache.check_invariants()
    assert slots.tolist() == [-1] * 9  # padding: a late write finds nothing to overwrite
    assert ids.tolist() == ALIKE[:9]


# -- a context ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_context_of_a_batch_abandons_it(error, device):
    cache = make(device=device)
    sequence = cache.add_sequence(ALIKE[:9])
    batch = cache.prepare([sequence], 9)
    with pytest.raises(error), batch:
        raise error
    assert not batch.in_flight
    assert cache.num_available == 16
    assert sequence.tokens.tolist() == ALIKE[:9]
    advance(cache, [sequence], 9)
    cache.check_invariants()


def test_the_normal_end_of_a_context_leaves_the_step_in_flight_and_no_lost_batch():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:9])
    with cache.prepare([sequence], 9) as batch:
        pass
    assert batch.in_flight
    cache.commit(batch)
    assert sequence.num_computed_tokens == 9


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_an_exception_after_the_end_of_a_step_abandons_nothing(end):
    cache = make()
    sequence = cache.add_sequence(ALIKE[:9])
    batch = cache.prepare([sequence], 9)
    with pytest.raises(Failure), batch:
        end_and_fail(getattr(cache, end), batch)
    assert sequence.num_computed_tokens == (9 if end == "commit" else 0)
    cache.check_invariants()


def test_a_context_returns_its_batch():
    cache = make()
    batch = cache.make_batch(2, 16)
    for count in (9, 1):
        sequence = cache.add_sequence(ALIKE[:count])
        with cache.prepare([sequence], count, out=batch) as same:
            assert same is batch
            cache.commit(same)


# -- abandon(sequences) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_abandon_a_lost_batch_that_something_still_refers_to(device):
    cache = make(device=device)
    sequences = [cache.add_sequence([100 * k + i for i in range(5)]) for k in range(3)]
    hidden = [cache.prepare(sequences[:2], 5), cache.prepare(sequences[2:], 5)]
    cache.abandon(sequences[0])
    assert [batch.in_flight for batch in hidden] == [False, True]
    cache.abandon(iter([sequences[2]]))
    assert cache.num_available == 16
    advance(cache, sequences, 5)
    cache.check_invariants()


def test_sequences_of_one_lost_batch_abandon_it_once():
    cache = make()
    sequences = [cache.add_sequence([100 * k + i for i in range(5)]) for k in range(3)]
    batches = [cache.prepare(sequences[:2], 5), cache.prepare(sequences[2:], 5)]
    cache.abandon(sequences)
    assert not any(batch.in_flight for batch in batches)
    for idle in (sequences, sequences[:1], sequences[0]):
        with pytest.raises(InvalidSequence, match="no step in flight"):
            cache.abandon(idle)


def test_a_sequence_whose_batch_was_collected_has_nothing_to_abandon():
    cache = make()
    sequence = cache.add_sequence([1])
    cache.prepare([sequence], 1)
    with pytest.raises(InvalidSequence, match="sequence 0 has no step in flight; there is nothing to abandon"):
        cache.abandon(sequence)
    cache.commit(cache.prepare([sequence], 1))


def test_a_refused_abandon_ends_no_step_and_leaves_no_lost_batch():
    cache = make()
    first, idle = cache.add_sequence(ALIKE[:5]), cache.add_sequence([1])
    stranger = make().add_sequence([1])
    batch = cache.prepare([first], 5)
    for wrong in ([first, idle], [first, stranger], [first, 7], None):
        with pytest.raises(InvalidSequence):
            cache.abandon(wrong)
        assert batch.in_flight
    cache.commit(batch)


def test_an_abandon_within_a_write_ends_no_step_and_leaves_no_lost_batch():
    cache = make()
    first, second = cache.add_sequence(range(5)), cache.add_sequence(range(10, 15))
    other, batch = cache.prepare([first], 5), cache.prepare([second], 5)
    refused = []

    def store(*_):
        with pytest.raises(InvalidSequence, match="within write or attend"):
            cache.abandon([first, second])
        refused.append((other.in_flight, batch.in_flight))

    batch._step.run(store)
    assert refused == [(True, True)]
    cache.commit(other)
    cache.commit(batch)


# -- stale -------------------------------------------------------------------------------------------------------------

ENDS = {
    "commit": lambda cache, sequence, batch: cache.commit(batch),
    "commit of a part": lambda cache, sequence, batch: cache.commit(batch, accepted=3),
    "abandon": lambda cache, sequence, batch: cache.abandon(batch),
    "abandon by its sequence": lambda cache, sequence, batch: cache.abandon(sequence),
    "commit without sequences": lambda cache, sequence, batch: (cache.remove(sequence), cache.commit(batch)),
}


@together("device", DEVICES)
@together("end", ENDS)
def test_a_stale_batch_is_refused_by_every_call(end, device):
    cache = make(device=device)
    sequence = cache.add_sequence(range(8))
    batch = cache.prepare([sequence], 8)
    ENDS[end](cache, sequence, batch)
    calls = {
        "write": lambda: cache.write(0, ZEROS, ZEROS, batch),
        "attend": lambda: cache.attend(0, np.zeros((8, 4, 8), np.float32), batch),
        "commit": lambda: cache.commit(batch),
        "abandon": lambda: cache.abandon(batch),
    }
    before = {layer: cache.key(layer).numpy().copy() for layer in range(cache.num_layers) if device == "cpu"}
    for call in calls.values():
        with pytest.raises(InvalidSequence, match="no step in flight"):
            call()
    for layer, plane in before.items():
        np.testing.assert_array_equal(cache.key(layer).numpy(), plane)
    cache.check_invariants()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_that_was_never_prepared_is_refused_as_a_stale_one(device):
    cache = make(device=device)
    batch = cache.make_batch(2, 8)
    with pytest.raises(InvalidSequence, match="between prepare and commit or abandon"):
        cache.write(0, ZEROS, ZEROS, batch)
    with pytest.raises(InvalidSequence, match="between prepare and commit or abandon"):
        cache.attend(0, np.zeros((8, 4, 8), np.float32), batch)


def test_a_stale_batch_serves_again_after_its_next_prepare():
    cache = make()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    for _ in range(2):
        cache.prepare([sequence], 4, out=batch)
        cache.write(0, ZEROS, ZEROS, batch)
        assert cache.attend(0, np.zeros((4, 4, 8), np.float32), batch).shape == (4, 4, 8)
        cache.commit(batch)
    assert sequence.num_computed_tokens == 8


def test_a_cache_without_bytes_is_named_while_a_batch_is_in_flight():
    cache = make(device="none")
    batch = cache.prepare([cache.add_sequence(range(8))], 8)
    with pytest.raises(DeviceError):
        cache.write(0, ZEROS, ZEROS, batch)
    cache.commit(batch)


# -- token ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_no_id_is_lost_in_a_batch_and_unknown_ones_are_minus_one(device):
    cache = make(device=device)
    first, second, third = cache.add_sequence([5, 6, 7, 8]), cache.add_sequence([9]), cache.add_sequence([3, 4])
    batch = cache.make_batch(4, 12)
    cache.prepare([first, second, third], [3, 3, 0], out=batch)
    assert np.asarray(batch.token_ids).tolist() == [5, 6, 7, 9, -1, -1] + [0] * 6
    assert np.asarray(batch.host.token_ids).dtype == np.int32
    cache.append_tokens([second], [[1, 2]])
    assert np.asarray(batch.token_ids)[3:6].tolist() == [9, -1, -1]  # the ids known at the prepare
    cache.commit(batch)
    address = np.asarray(batch.token_ids).ctypes.data
    cache.prepare([third, first], [2, 2], out=batch)
    assert np.asarray(batch.token_ids).tolist() == [3, 4, 8, -1] + [0] * 8
    assert np.asarray(batch.token_ids).ctypes.data == address
    cache.commit(batch)


def test_the_ids_of_reused_tokens_are_in_no_batch():
    cache = make()
    advance(cache, [cache.add_sequence(ALIKE[:12])], 12)
    again = cache.add_sequence(ALIKE[:12])
    with cache.prepare([again], 4) as batch:
        assert np.asarray(batch.token_ids).tolist() == ALIKE[8:12]
        cache.commit(batch)
