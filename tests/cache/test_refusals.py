"""Invalid arguments of a cache are refused by name before anything is changed."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    Alias,
    DeviceError,
    InvalidSequence,
    LatentSpec,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    ShapeError,
    StateSpec,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache.step import prepare
from pagecore.index import StepBuffers
from pagecore.storage.state_shapes import delta_planes
from tests.cache.caches import SPEC, advance, make, make_static, normal
from tests.together import together


@together(
    ("options", "error"),
    [
        ({"prefix_cache": "yes"}, UnsupportedOption),
        ({"eviction_policy": "best"}, UnsupportedOption),
        ({"parallel": 2}, UnsupportedOption),
        ({"device": "cuda:9999"}, DeviceError),
        ({"device": "tpu"}, DeviceError),
        ({"index_dtype": "uint8"}, UnsupportedOption),
        ({"layout": "rowwise"}, UnsupportedOption),
        ({"num_blocks": None}, ShapeError),
        ({"memory": "1GiB"}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": [17, 17]}, ShapeError),
        ({"block_size": 0}, ShapeError),
        ({"max_sequences": 0}, ShapeError),
        ({"max_tokens_per_sequence": 0}, ShapeError),
        ({"num_blocks": None, "memory": 100}, NotEnoughMemory),
        ({"layers": []}, ShapeError),
        ({"layers": [Alias(0)]}, ShapeError),
        ({"layers": [SPEC, Alias(1)]}, ShapeError),
        ({"layers": ["llama"]}, UnsupportedOption),
        ({"layers": [SPEC, SPEC], "num_layers": 3}, ShapeError),
        ({"num_layers": 0}, ShapeError),
        ({"layers": [SPEC], "num_layers": np.array([1, 2])}, ShapeError),
        ({"layers": [SPEC], "num_layers": 1.0}, ShapeError),
        ({"layers": [SPEC, Alias("0")]}, ShapeError),
        ({"layers": [SPEC, Alias(-(10**5000))]}, ShapeError),
        ({"eviction_policy": np.array(["lru", "lfu"])}, UnsupportedOption),
        ({"index_dtype": 10**5000}, UnsupportedOption),
        ({"num_layers": 10**5000}, ShapeError),
        ({"block_size": 2**31}, ShapeError),
        ({"block_size": 10**5000}, ShapeError),
        ({"num_blocks": 10**5000}, ShapeError),
        ({"num_blocks": None, "memory": 10**5000}, ShapeError),
        ({"num_blocks": 10**5000, "memory": 10**5000}, ShapeError),
        ({"max_tokens_per_sequence": -(10**5000)}, ShapeError),
    ],
)
def test_invalid_options_of_a_cache_are_refused(options, error):
    with pytest.raises(error):
        make(**options)


@together(
    ("options", "says"),
    [
        ({"num_blocks": 1}, "num_blocks is 1; it must be at least 2 because block 0 is the reserved null block"),
        ({"num_blocks": [0]}, "num_blocks is 0; it must be at least 2 because block 0 is the reserved null block"),
        ({"num_states": 1}, "num_states is 1; it must be at least 2 because slot 0 is the reserved null slot"),
        ({"num_checkpoints": 1}, "num_checkpoints is 1; .* because slot 0 is the reserved null slot"),
    ],
)
def test_a_pool_of_the_null_entry_alone_is_refused_with_the_reason(options, says):
    layers = (
        [SPEC, StateSpec(delta_planes(1, 1, 4, 4), checkpoint_format="int8")] if "num_blocks" not in options else SPEC
    )
    with pytest.raises(ShapeError, match=says):
        make(layers=layers, **options)


def test_one_id_for_a_list_of_sequences_is_refused_as_such():
    cache = make()
    sequences = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
    for count in (1, 2):
        with pytest.raises(ShapeError, match=f"ids is one token id for a list of {count} sequences; give a list"):
            cache.append_tokens(sequences[:count], 5)
    with pytest.raises(ShapeError, match="1 ids are given for 2 sequences"):
        cache.append_tokens(sequences, [5])
    assert [sequence.num_tokens for sequence in sequences] == [2, 1]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([[1, 2]], ShapeError),
        ([1.5], UnsupportedDtype),
        ([2**31], ShapeError),
        (range(65), ShapeError),
        (5, ShapeError),
    ],
)
def test_invalid_tokens_are_refused(tokens, error):
    cache = make()
    with pytest.raises(error):
        cache.add_sequence(tokens)
    assert cache.num_sequences == 0
    cache.check_invariants()


def test_an_invalid_step_is_refused_and_changes_nothing():
    cache, other = make(), make()
    first, second, foreign = cache.add_sequence(range(20)), cache.add_sequence(range(20)), other.add_sequence([1])
    gone = cache.add_sequence([1])
    cache.remove(gone)
    batch = cache.make_batch(2, 8)
    before = cache.stats()
    for sequences, counts, error in (
        ([first, first], 1, InvalidSequence),
        ([first, foreign], 1, InvalidSequence),
        ([first, gone], 1, InvalidSequence),
        ([first, "second"], 1, InvalidSequence),
        ([first, None], 1, InvalidSequence),
        ([first], -1, ShapeError),
        ([first], [1, 2], ShapeError),
        ([first], 1.5, UnsupportedDtype),
        ([first], [1.5], UnsupportedDtype),
        ([first], None, UnsupportedDtype),
        ([first], 2**40, ShapeError),
        ([first, second], [5, 4], ShapeError),
        ([first], np.ones((1, 1), int), ShapeError),
    ):
        with pytest.raises(error):
            cache.prepare(sequences, counts, out=batch)
        assert cache.stats() == before
    with pytest.raises(ShapeError):
        cache.prepare([first], 65)
    with pytest.raises(InvalidSequence, match="batch"):
        cache.prepare([first], 1, out=other.make_batch())
    with pytest.raises(InvalidSequence, match="batch"):
        cache.commit("batch")
    assert cache.stats() == before


@together(
    ("counts", "error"),
    [
        (None, UnsupportedDtype),
        (["a", "b"], UnsupportedDtype),
        ([[1], [2, 3]], ShapeError),
        (object(), UnsupportedDtype),
        ({1, 2}, UnsupportedDtype),
        (float("nan"), UnsupportedDtype),
        ([-1, 3], ShapeError),
        (2**31 - 1, ShapeError),
        (2**70, ShapeError),
        ([2**70, 1], ShapeError),
        (np.array(["2020"], "M8[D]"), UnsupportedDtype),
    ],
)
def test_invalid_counts_are_refused_before_a_batch_is_made(counts, error):
    cache = make()
    sequences = [cache.add_sequence(range(5)) for _ in range(2)]
    before = cache.stats()
    for use in (cache.prepare, cache.try_prepare, cache.shortage):
        with pytest.raises(error, match=r"count|token"):
            use(sequences, counts)
    assert cache.stats() == before


def test_a_wrong_count_allocates_no_arrays(monkeypatch):
    cache = make(num_blocks=9)
    sequences = [cache.add_sequence(range(5)) for _ in range(2)]
    made = []
    monkeypatch.setattr(prepare, "StepBuffers", lambda *sizes: made.append(sizes) or StepBuffers(*sizes))
    with pytest.raises(OutOfBlocks):
        cache.prepare(sequences, [30, 3])
    with pytest.raises(ShapeError):
        cache.prepare(sequences, [2**30, 2])
    with pytest.raises(ShapeError):
        cache.prepare(sequences, 2**31 - 1)
    assert cache.try_prepare(sequences, 32) is None
    assert made == []
    batch = cache.prepare(sequences, [26, 2])
    assert (made, batch.max_sequences, batch.max_tokens) == ([(2, 28, 1, "int64", 0, False)], 2, 28)


class Preparing:
    """A count that prepares the batch into which it is being loaded."""

    def __init__(self, cache, sequence, batch, count):
        self.prepare = lambda: cache.prepare([sequence, cache.add_sequence(range(9))], [count, 2], out=batch)

    def __index__(self):
        self.prepare()
        return 1


def test_a_count_that_prepares_the_same_batch_is_refused_and_leaves_that_step_unchanged():
    cache = make()
    first, second, third = (cache.add_sequence(range(20)) for _ in range(3))
    batch = cache.make_batch(2, 12)
    with pytest.raises(InvalidSequence, match="prepared the same batch"):
        cache.prepare([first, second], [5, Preparing(cache, third, batch, 7)], out=batch)
    assert np.asarray(batch.query_lens).tolist() == [7, 2]
    cache.commit(batch)
    assert [one.num_computed_tokens for one in (first, second, third)] == [0, 0, 7]
    cache.check_invariants()


@pytest.mark.parametrize("layer", [-1, 2, 2**70, "0", None, 0.0])
def test_an_unknown_layer_is_refused_by_cache_and_batch(layer):
    cache = make(num_layers=2)
    batch = cache.make_batch()
    for use in (cache.key, cache.group_of, batch.group):
        with pytest.raises(ShapeError, match=r"layer is .*; the cache has layers 0 to 1"):
            use(layer)
        use(np.int64(1))


@pytest.mark.parametrize("device", ["cpu", "none"])
@pytest.mark.parametrize("layout", ["rowwise", "", 5, []])
def test_an_invalid_layout_is_refused_with_and_without_bytes(device, layout):
    with pytest.raises(UnsupportedOption, match="layout is"):
        make(device=device, layout=layout)


def test_a_prepare_whose_plan_fails_takes_nothing():
    cache = make()
    sequence = cache.add_sequence(range(6))
    batch = cache.make_batch()
    plan = batch._groups[0].plan
    before = cache.stats()
    batch._groups[0] = replace(batch._groups[0], plan="no plan")
    with pytest.raises(TypeError):
        cache.prepare([sequence], 4, out=batch)
    assert cache.stats() == before
    batch._groups[0] = replace(batch._groups[0], plan=plan)
    advance(cache, [sequence], 4, out=batch)
    assert sequence.num_computed_tokens == 4


def test_a_step_ends_once():
    cache = make()
    sequence = cache.add_sequence(range(8))
    batch = cache.make_batch(1, 4)
    with pytest.raises(InvalidSequence, match="no step in flight"):
        cache.commit(batch)
    cache.prepare([sequence], 4, out=batch)
    for use in (
        lambda: cache.prepare([sequence], 1),
        lambda: cache.prepare([], [], out=batch),
        lambda: cache.fork(sequence),
        lambda: cache.truncate(sequence, 0),
        lambda: cache.reorder([sequence], [sequence]),
    ):
        with pytest.raises(InvalidSequence, match="in flight"):
            use()
    for accepted, error in (
        ([5], ShapeError),
        ([-1], ShapeError),
        ([1, 1], ShapeError),
        (5, ShapeError),
        ([0.5], UnsupportedDtype),
    ):
        with pytest.raises(error, match="accepted"):
            cache.commit(batch, accepted)
    cache.commit(batch)
    with pytest.raises(InvalidSequence, match="no step in flight"):
        cache.abandon(batch)
    assert sequence.num_computed_tokens == 4


def test_names_are_unique_and_rows_are_limited():
    cache = make(max_sequences=2)
    cache.add_sequence([], id="a")
    with pytest.raises(InvalidSequence, match="'a'"):
        cache.add_sequence([], id="a")
    b = cache.add_sequence([])
    with pytest.raises(OutOfRows):
        cache.add_sequence([])
    with pytest.raises(OutOfRows):
        cache.fork(b)
    cache.remove(b)
    cache.add_sequence([])
    assert cache.num_sequences == 2


def test_wrong_layers_and_short_keys_are_refused_before_anything_is_written():
    cache = make()
    sequence = cache.add_sequence(range(4))
    batch = cache.prepare([sequence], 4)
    key = normal(4, 2, 8)
    cache.key(0)[:] = 7.0
    for layer in (1, -1, "0", None):
        with pytest.raises(ShapeError, match="layer"):
            cache.write(layer, key, key, batch)
    with pytest.raises(ShapeError, match=r"3 tokens; the step has 4$"):
        cache.write(0, key[:3], key[:3], batch)
    with pytest.raises(ShapeError, match=r"2 tokens; the step has 4: pass key.transpose\(1, 0, 2\)"):
        cache.write(0, key.transpose(1, 0, 2), key.transpose(1, 0, 2), batch)
    with pytest.raises(ShapeError):
        cache.write(0, key, key[:3], batch)
    assert (np.asarray(cache.key(0)) == 7.0).all()
    with pytest.raises(ShapeError):
        cache.attend(0, normal(3, 4, 8), batch)


@pytest.mark.parametrize(
    "spec", [SPEC, LatentSpec(8, 0, scale=1.0, num_query_heads=4, dtype="float32")], ids=["kv", "latent"]
)
def test_attend_refuses_what_the_batch_supplies_by_name(spec):
    cache = make(spec)
    batch = cache.prepare([cache.add_sequence([1, 2, 3])], 3)
    out = np.full((3, 4, 8), 7.0, np.float32)
    query = normal(3, 4, 8) if spec is SPEC else (normal(3, 4, 8), None)
    for name in ("rows", "cu_query_lens", "block_table", "seq_lens"):
        for value in ([0], "all", None, 1.5, np.arange(2)):
            with pytest.raises(UnsupportedOption, match=rf"^{name} is .*, but attend takes it from the batch; leave"):
                cache.attend(0, query, batch, **{name: value}, out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "ids", [[2, 3], (2, 3), np.array([2, 3]), range(2, 4), [[2, 3]], np.array([[2, 3]]), [np.int64(2), 3]], ids=repr
)
def test_ids_of_one_sequence_need_no_list_of_lists(ids):
    cache = make()
    sequence = cache.add_sequence([1])
    cache.append_tokens(sequence, ids)
    for one in (4, np.int32(5), [6], np.array([7])):
        cache.append_tokens(sequence, one)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_append_refuses_without_appending():
    cache = make()
    first, second = cache.add_sequence([1]), cache.add_sequence([2])
    for sequences, ids, error in (
        ([first, second], [1], ShapeError),
        ([first, second], [[1], [2.5]], UnsupportedDtype),
        ([first, "x"], [1, 2], InvalidSequence),
        ([first, second], [1.0, 2.0], UnsupportedDtype),
        (first, [[1], [2]], UnsupportedDtype),
        (first, np.ones((2, 3), np.int32), ShapeError),
        (first, [], ShapeError),
        (first, np.zeros(0, np.int32), ShapeError),
        (first, [True, False], UnsupportedDtype),
        ([first, second], [[True], [1]], UnsupportedDtype),
        (first, None, UnsupportedDtype),
    ):
        with pytest.raises(error):
            cache.append_tokens(sequences, ids)
    assert (first.num_tokens, second.num_tokens) == (1, 1)


def test_messages_show_arrays_in_place_of_other_objects_on_one_short_line():
    cache, array = make(), np.zeros((200, 4, 8), np.float32)
    sequence = cache.add_sequence([1])
    for call in (
        lambda: cache.write(0, sequence, array, array),  # arguments in another order
        lambda: cache.prepare([array], 1),
        lambda: cache.swap_out([sequence], array),
        lambda: cache.prepare([sequence], 1, stream=array),
    ):
        with pytest.raises((InvalidSequence, UnsupportedOption)) as refusal:
            call()
        message = str(refusal.value)
        assert "array(" in message
        assert "\n" not in message
        assert len(message) < 200


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_can_be_neither_copied_nor_pickled(use):
    for cache in (make(), make_static()):
        with pytest.raises(UnsupportedOption, match=f"a {type(cache).__name__} cannot be copied or pickled; make one"):
            use(cache)
