"""Foreign values as arguments: a refusal raises one of our errors and changes nothing."""

import random

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.serving.demo import DemoConfig, demo
from pagecore.serving.demo.hybrid import HybridSizes
from pagecore.serving.demo.model import ModelSizes
from pagecore.serving.metrics import Histogram, Series
from pagecore.serving.pictures.timeline import Timeline
from pagecore.serving.planner import plan_memory, plan_model
from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.replay.trace import read_trace, scan_trace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.models.published import PUBLISHED
from tests.serving.runs import drain, expected, request

SPEC = AttentionSpec(1, 8)
MODEL = PUBLISHED["gemma-2-9b"]
LINE = '{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'


class Listing:
    """An object with some methods of a list."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([1, 2, 3])


class Refusing:
    """An object that NumPy cannot read, such as a tensor of torch without data."""

    def __array__(self, *options, **more):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


class Broken:
    """An object whose conversions have a defect of their own."""

    def __array__(self, *options, **more):
        raise KeyError("shape")

    def __index__(self):
        raise KeyError("number")


# There are no callables: a callable that is called with the wrong arguments raises its own error.
VALUES = [
    *(None, True, False, "x", "", "64GiB", "\0", "\ud800", "/dev/zero", b"x", 1.5, float("nan"), float("inf")),
    *(-1, 0, 1, 3, 2**31, 2**63, 2**70, -(2**70), 10**400, 3 + 2j, [], [1, 2], [[1], [2, 3]], [None], ["a"], (1, 2)),
    *(
        {},
        {"a": 1},
        {1, 2},
        range(3),
        object(),
        Listing(),
        Refusing(),
        Broken(),
        np.array([1, 2]),
        np.array(5),
        np.array([]),
        np.zeros((2, 2)),
    ),
    *(np.float32(3), np.int64(4), np.array([1, None], object), np.datetime64("2020"), np.array([2**40]), 10**18),
]


def scheduler(**limits):
    return Scheduler(PagedKVCache(SPEC, num_blocks=20, device="none", max_sequences=4), **limits)


def with_step(use):
    """Call `use` with a scheduler and its open step; then check that the run still gets its tokens."""
    made = scheduler()
    run = made.add(request(0, 3, 4))
    step = made.schedule()
    try:
        use(made, step)
    finally:
        made.check_invariants()
        assert made.step is step
        made.commit(step) if not step.is_committed else None
        made.accept(step, [expected(run.request, 0)[3]])
        assert [list(each.tokens) for each in drain(made)] == [expected(run.request, 0)]


def accept_ids(value):
    def use(made, step):
        made.commit(step)
        made.accept(step, value)

    with_step(use)


TARGETS = {
    "Scheduler": Scheduler,
    **{
        f"Scheduler.{name}": lambda value, name=name: scheduler(**{name: value})
        for name in ("max_running", "max_tokens_per_step", "headroom", "swap_space", "states_per_run")
    },
    "add": lambda value: scheduler().add(value),
    "cancel": lambda value: scheduler().cancel(value),
    "preempt": lambda value: scheduler().preempt([value]),
    "check_request.num_prompt_tokens": lambda value: scheduler().check_request(0, value, 1),
    "check_request.max_new_tokens": lambda value: scheduler().check_request(0, 1, value),
    "check_request.samples": lambda value: scheduler().check_request(0, 1, 1, value),
    "commit": lambda value: with_step(lambda made, _: made.commit(value)),
    "abandon": lambda value: with_step(lambda made, _: made.abandon(value)),
    "accept.step": lambda value: with_step(lambda made, _: made.accept(value, [1])),
    "Request.id": lambda value: scheduler().add(Request(value, [1], 1)),
    "Request.prompt": lambda value: scheduler().add(Request(0, value, 1)),
    "Request.max_new_tokens": lambda value: scheduler().add(Request(0, [1], value)),
    "Request.samples": lambda value: scheduler().add(Request(0, [1], 1, value)),
    "Request.max_reused_tokens": lambda value: scheduler().add(Request(0, [1], 1, max_reused_tokens=value)),
    "Request.namespace": lambda value: scheduler().add(Request(0, [1], 1, 1, value)),
    "plan_model.config": lambda value: plan_model(value, "1GiB"),
    "plan_model.memory": lambda value: plan_model(MODEL, value),
    **{
        f"plan_model.{name}": lambda value, name=name: plan_model(MODEL, "40GiB", **{name: value})
        for name in ("ranks", "block_size", "context", "dtype")
    },
    "plan_memory.layers": lambda value: plan_memory(value, "1GiB"),
    "plan_memory.memory": lambda value: plan_memory([SPEC], value),
    **{
        f"DemoConfig.{name}": lambda value, name=name: DemoConfig(**{name: value})
        for name in DemoConfig.__dataclass_fields__
    },
    **{
        f"ModelSizes.{name}": lambda value, name=name: ModelSizes(**{name: value})
        for name in ModelSizes.__dataclass_fields__
    },
    **{
        f"HybridSizes.{name}": lambda value, name=name: HybridSizes(**{name: value})
        for name in HybridSizes.__dataclass_fields__
        if name not in ModelSizes.__dataclass_fields__
    },
    "DemoConfig.hybrid.num_states": lambda value: DemoConfig.hybrid(num_states=value),
    "demo": lambda value: None if value is None else demo(value),
    "Histogram.add": lambda value: Histogram().add(value),
    "Histogram.percentile": lambda value: Histogram().percentile(value),
    "Series": Series,
    "Timeline.columns": Timeline,
    "Timeline.rows": lambda value: Timeline(4, value),
}


def try_all(use, values=VALUES):
    """Return the number of refused values; each must raise one of our errors, with a short message."""
    messages = []
    for value in values:
        try:
            use(value)
        except PagecoreError as error:
            messages.append(str(error))
    assert max(map(len, messages), default=0) < 1000
    return len(messages)


@pytest.mark.parametrize("name", TARGETS)
def test_a_foreign_value_is_accepted_or_refused_by_name(name):
    refused = try_all(TARGETS[name])
    assert refused > len(VALUES) / 2 or name in {"Request.id", "Request.namespace"}


def test_foreign_ids_are_refused_and_the_step_stays_open():
    assert try_all(accept_ids) == len(VALUES)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE)
    return path


@pytest.mark.parametrize("name", sorted(ReplayOptions.__dataclass_fields__.keys() - {"layers"}))
def test_a_foreign_option_of_a_replay_is_accepted_or_refused_by_name(trace, name):
    others = {} if name in ("memory", "blocks") else {"blocks": 10}
    assert try_all(lambda value: replay(trace, ReplayOptions(**others | {name: value}))) > len(VALUES) / 2


@pytest.mark.parametrize("name", ["path", "options", "progress", "watchers"])
def test_a_foreign_argument_of_a_replay_is_refused_by_name(trace, name):
    def use(value):
        replay(**{"path": trace, "options": ReplayOptions(blocks=10)} | {name: value})

    assert try_all(use) >= len(VALUES) - 4


@pytest.mark.parametrize("read", [scan_trace, lambda *given, **named: list(read_trace(*given, **named))])
def test_a_foreign_argument_of_a_trace_is_refused_by_name(trace, read):
    assert try_all(read) == len(VALUES)
    assert try_all(lambda value: read(trace, value)) > len(VALUES) / 2
    assert try_all(lambda value: read(trace, prefill_only=value)) == len(VALUES) - 2


def test_a_scheduler_refuses_an_object_that_is_not_a_cache():
    with pytest.raises(UnsupportedOption, match="expected a PagedKVCache as cache, got 5"):
        Scheduler(5)


def test_random_calls_of_a_scheduler_raise_our_errors_and_keep_it_consistent():
    """Call every method in random order with runs, steps and foreign values."""
    choice = random.Random(5)
    for _ in range(30):
        made = scheduler(max_tokens_per_step=choice.randint(4, 40))
        other = scheduler()
        runs = [other.add(request(0, 3, 2))]
        steps = [other.schedule()]
        for _ in range(60):
            step = choice.choice([*steps, steps[-1], choice.choice(VALUES)])
            run = choice.choice([*runs, choice.choice(VALUES)])
            ids = choice.choice([choice.choice(VALUES), [7] * choice.randint(0, 4)])
            try:
                match choice.choice(["add", "schedule", "schedule", "commit", "commit", "accept", "abandon", "cancel"]):
                    case "add":
                        runs.append(
                            made.add(
                                request(len(runs), choice.randint(1, 60), choice.randint(0, 5), choice.randint(1, 3))
                            )
                        )
                    case "schedule":
                        steps.append(made.schedule() or steps[-1])
                    case "commit":
                        made.commit(step)
                    case "accept":
                        made.accept(step, ids)
                    case "abandon":
                        made.abandon(step)
                    case "cancel":
                        made.cancel(run)
            except PagecoreError:
                pass
            made.check_invariants()
            made.cache.check_invariants()
        for run in (*made.running, *made.waiting):
            made.cancel(run)
        if made.step is not None:
            if made.step.is_committed:
                made.accept(made.step, [7] * len(made.step.outputs))
            else:
                made.abandon(made.step)
        assert made.schedule() is None
        assert made.cache.num_sequences == 0
