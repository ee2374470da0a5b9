"""Early ends: stop ids, flags and minimum lengths, and the options of a request."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.scheduling.request import Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import request, sampled
from tests.serving.served import Server, answer
from tests.together import together


class OnDevice:
    """A tensor that NumPy cannot read, like one of torch on a CUDA device."""

    def __array__(self, *_arguments, **_options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_a_run_unless_it_is_ignored(ignore_eos, overlap):
    plain = Request(0, [1, 2, 3], 12)
    stop = answer(plain)[7]
    server = Server(overlap=overlap)
    one = Request(0, [1, 2, 3], 12, stop_token_ids={stop, 2000}, ignore_eos=ignore_eos)
    run = server.add(one)
    other = server.add(Request(1, [4, 5], 12))
    server.drain()
    whole = answer(plain)
    assert run.tokens.tolist() == (whole if ignore_eos else whole[: whole.index(stop, 3) + 1])
    assert other.num_generated == 12
    assert run.state is State.FINISHED
    server.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [0, 1, 4, 5, 12])
def test_stop_ids_end_nothing_before_the_minimum(least, overlap):
    whole = answer(Request(0, [1, 2, 3], 12))
    server = Server(overlap=overlap, num_blocks=9)  # some are preempted
    runs = [
        server.add(Request(number, [1, 2, 3], 12, stop_token_ids=whole[4:], min_new_tokens=least)) for number in (0, 1)
    ]
    server.drain()
    assert [run.num_generated for run in runs] == [max(2, least)] * 2
    server.check_empty()


def test_flags_end_runs_with_their_id_and_free_their_blocks():
    cache = FakeCache(20, prefix_cache=False)
    scheduler = Scheduler(cache)
    runs = [scheduler.add(request(number, 5, 8)) for number in range(3)]
    step = scheduler.schedule()
    scheduler.commit(step)
    assert scheduler.accept(step, [7, 8, 9], np.array([True, False, True])) == [runs[0], runs[2]]
    assert [run.tokens[5:].tolist() for run in (runs[0], runs[2])] == [[7], [9]]
    assert len(cache.sequences) == 1
    assert cache.num_available == 19 - 2


@pytest.mark.parametrize(
    ("flags", "error", "reason"),
    [
        ([True], ShapeError, "finished has shape (1,); expected one flag for each of 2 outputs"),
        ([[True, False]], ShapeError, "finished has shape (1, 2)"),
        ([[True], [False, True]], ShapeError, "finished is not a 1-D array of booleans"),
        ([0, 1], UnsupportedDtype, "finished has dtype int64; expected booleans"),
        (OnDevice(), ShapeError, "finished is not a 1-D array of booleans: can't convert"),
    ],
)
def test_wrong_flags_are_refused_and_change_nothing(flags, error, reason):
    scheduler = Scheduler(FakeCache(20))
    for number in range(2):
        scheduler.add(request(number, 3, 3))
    step = scheduler.schedule()
    scheduler.commit(step)
    with pytest.raises(error) as caught:
        scheduler.accept(step, [1, 2], flags)
    assert reason in str(caught.value)
    assert scheduler.accept(step, sampled(step), [False, False]) == []


@together(
    ("options", "error", "reason"),
    [
        ({"stop_token_ids": [1.5]}, UnsupportedDtype, "stop_token_ids has dtype float64"),
        ({"stop_token_ids": ["</s>"]}, UnsupportedDtype, "stop_token_ids has dtype"),
        ({"stop_token_ids": [True]}, UnsupportedDtype, "stop_token_ids has dtype bool"),
        ({"stop_token_ids": 3}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": None}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": OnDevice()}, ShapeError, "stop_token_ids is not a 1-D array of token ids: can't convert"),
        ({"stop_token_ids": "12"}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": [2**31]}, ShapeError, "stop_token_ids has token id 2147483648"),
        ({"min_new_tokens": -1}, ShapeError, "min_new_tokens is -1; expected an integer"),
        ({"min_new_tokens": 2}, ShapeError, "min_new_tokens is 2, but max_new_tokens is 1"),
        ({"ignore_eos": 1}, UnsupportedOption, "ignore_eos is 1"),
        ({"priority": "high"}, ShapeError, "priority is 'high'; expected an integer"),
        ({"priority": True}, ShapeError, "priority is True"),
        ({"priority": 0.5}, ShapeError, "priority is 0.5"),
        ({"priority": None}, ShapeError, "priority is None"),
    ],
)
def test_wrong_options_of_a_request_are_refused(options, error, reason):
    with pytest.raises(error) as caught:
        Request(0, [1], 1, **options)
    assert reason in str(caught.value)


def test_stop_ids_are_a_sorted_tuple():
    for given in ([3, 1, 3], (3, 1), {1, 3}, np.array([3, 1]), range(1, 4, 2), {3: "a", 1: "b"}.keys(), iter([3, 1])):
        assert Request(0, [1], 1, stop_token_ids=given).stop_token_ids == (1, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_numbers_of_numpy_are_kept_as_integers_of_python(kind):
    one = Request(0, np.arange(200), kind(100), kind(1), priority=kind(3))
    assert [type(value) for value in (one.max_new_tokens, one.samples, one.priority)] == [int] * 3
    scheduler = Scheduler(FakeCache(200), policy="priority", max_running=1)
    runs = [scheduler.add(Request(number, [1, 2], 3, priority=kind(number))) for number in (0, 1)]
    assert scheduler.schedule().runs == [runs[1]]
    assert scheduler.add(one).last_length == 300
