"""Statistics of the runner, on a clock that only the works advance."""

from __future__ import annotations

import gc

import pytest

from bench.harness.figures import Spread
from bench.harness.runner import Bench, Effort, Job


class Clock:
    """Clock that only `work` advances, by its next number of seconds (the last one repeatedly)."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        left = list(seconds)

        def run():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def bench_on(clock, **effort):
    lines = []
    bench = Bench(clock=clock, write=lines.append)
    bench.effort = Effort(**{"figure_s": 0.0, "rounds_min": 3, "sample_s": 0.0} | effort)
    return bench, lines


def nothing():
    pass


def test_times_are_medians_with_minimum_and_maximum():
    clock = Clock()
    bench, _ = bench_on(clock)
    # The first call warms up and is not counted.
    figure = bench.compare("x", clock.work("s", 9, 3, 1, 2), {"c": clock.work("c", 99, 10, 30, 20)}, check=nothing)
    assert figure.rounds == 3
    assert figure.subject == Spread(1, 2, 3)
    assert figure.controls["c"].time == Spread(10, 20, 30)


def test_the_ratio_is_taken_within_each_round():
    clock = Clock()
    bench, _ = bench_on(clock)
    # A slow moment, three times slower, does not change the ratio.
    figure = bench.compare("x", clock.work("s", 1, 1, 3, 1), {"c": clock.work("c", 1, 4, 12, 5)}, check=nothing)
    assert figure.controls["c"].ratio == Spread(4, 4, 5)


def test_rounds_interleave_and_reverse_their_order():
    clock = Clock()
    bench, _ = bench_on(clock)
    bench.compare("x", clock.work("s", 1), {"a": clock.work("a", 1), "b": clock.work("b", 1)}, check=nothing)
    assert "".join(clock.order[3:]) == "sab" + "bas" + "sab"


def test_rounds_go_on_until_the_time_is_spent():
    clock = Clock()
    bench, _ = bench_on(clock, figure_s=20.0)
    assert bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=nothing).rounds == 10
    bench.effort = Effort(figure_s=20.0, rounds_min=3, rounds_max=5, sample_s=0.0)
    assert bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=nothing).rounds == 5


def test_a_short_call_is_timed_as_a_loop_and_a_long_one_alone():
    clock = Clock()
    bench, _ = bench_on(clock, sample_s=10.0)
    figure = bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 11)}, check=nothing)
    # Loops of 1 and 4 are too short; three rounds of 16 follow the one that was long enough.
    assert clock.order.count("s") == 1 + 4 + 16 + 3 * 16
    assert clock.order.count("c") == 1 + 3
    assert figure.subject == Spread(1, 1, 1)


def test_before_and_after_of_a_job_are_not_timed_and_a_job_is_never_looped():
    clock = Clock()
    bench, _ = bench_on(clock, sample_s=100.0)
    job = Job(clock.work("s", 2), before=clock.work("<", 50), after=clock.work(">", 70))
    figure = bench.compare("x", job, {"c": Job(clock.work("c", 4))}, check=nothing)
    assert figure.subject == Spread(2, 2, 2)
    assert figure.controls["c"].ratio == Spread(2, 2, 2)
    assert "".join(clock.order).count("<s>") == clock.order.count("s") == 4


def test_the_time_of_a_job_of_many_calls_is_that_of_one_call():
    clock = Clock()
    bench, _ = bench_on(clock)
    figure = bench.compare(
        "x", Job(clock.work("s", 6), calls=3), {"c": Job(clock.work("c", 40), calls=10)}, check=nothing
    )
    assert figure.subject == Spread(2, 2, 2)
    assert figure.controls["c"].ratio == Spread(2, 2, 2)


def test_a_figure_can_fix_its_rounds_except_in_a_smoke_run():
    clock = Clock()
    bench, _ = bench_on(clock, figure_s=1000.0, rounds_min=9)
    assert bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=nothing, rounds=2).rounds == 2
    smoke = Bench(kind="smoke", clock=clock, write=nothing_of)
    assert smoke.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=nothing, rounds=5).rounds == 2


def test_results_are_checked_before_anything_is_timed():
    clock = Clock()
    bench, lines = bench_on(clock)

    def differ():
        raise AssertionError("they differ")

    with pytest.raises(AssertionError, match="they differ"):
        bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=differ)
    assert clock.order == []
    assert lines == []
    assert bench.figures == []


def test_a_figure_without_a_control_is_refused():
    with pytest.raises(ValueError, match="no control"):
        Bench().compare("x", nothing, {}, check=nothing)


def test_targets_are_shown_with_their_figures_and_fail_nothing():
    clock = Clock()
    bench, lines = bench_on(clock)
    work, control = clock.work("s", 8e-6), {"a": clock.work("a", 16e-6), "b": clock.work("b", 4e-6)}
    bench.compare("x", work, control, check=nothing, per=2, each="block", at_most=3.5, at_least={"a": 1.9, "b": 0.6})
    assert "4.00 us a block (4.00 to 4.00)" in lines[0]
    assert lines[0].endswith("target <= 3.5 us a block: not met")
    assert lines[1].endswith("2.00x (2.00 to 2.00)   target >= 1.9x: met")
    assert lines[2].endswith("0.50x (0.50 to 0.50)   target >= 0.6x: not met")


def test_the_json_holds_units_sizes_rates_ratios_and_targets():
    clock = Clock()
    bench, _ = bench_on(clock)
    bench.compare(
        "x",
        clock.work("s", 0.25),
        {"c": clock.work("c", 0.5)},
        check=nothing,
        unit="ms",
        nbytes=10**9,
        at_most=300.1,
        at_least={"c": 3},
        sizes={"rows": 4},
    )
    bench.note("said")
    bench.fact("counted", 3, "steps")
    bench.fact("taken", [2.0, 1.0, 4.0])
    (figure,) = bench.as_json()["figures"]
    assert figure["unit"] == "ms"
    assert figure["rounds"] == 3
    assert figure["sizes"] == {"rows": 4}
    spread = {"min": 250, "median": 250, "max": 250}
    assert figure["subject"] == spread | {"gb_per_s": 4, "target": {"at_most": 300.1, "met": True}}
    control = figure["controls"]["c"]
    assert control["ratio"] == {"min": 2, "median": 2, "max": 2}
    assert control["gb_per_s"] == 2
    assert control["target"] == {"at_least": 3, "met": False}
    assert bench.as_json()["notes"] == ["said"]
    assert bench.as_json()["facts"] == {"counted, steps": 3, "taken": {"min": 1, "median": 2, "max": 4}}


def test_a_rate_can_have_a_target():
    clock = Clock()
    bench, lines = bench_on(clock)
    work, control = clock.work("s", 0.5), {"c": clock.work("c", 1)}
    figure = bench.compare("x", work, control, check=nothing, nbytes=10**9, gb_per_s_at_least=2)
    assert figure.met
    assert lines[0].endswith("2.0 GB/s   target >= 2 GB/s: met")
    assert figure.as_json()["subject"]["target"] == {"gb_per_s_at_least": 2, "met": True}
    assert not bench.compare("x", work, control, check=nothing, nbytes=10**9, gb_per_s_at_least=2.1).met
    with pytest.raises(ValueError, match="two targets"):
        bench.compare("x", work, control, check=nothing, nbytes=1, gb_per_s_at_least=2, at_most=1)


def test_the_targets_are_repeated_in_a_table():
    clock = Clock()
    bench, lines = bench_on(clock)
    work, control = clock.work("s", 8e-6), {"a": clock.work("a", 16e-6), "b": clock.work("b", 4e-6)}
    bench.compare("first", work, control, check=nothing, at_most=7.5, at_least={"a": 1.9})
    bench.compare("second", work, control, check=nothing)
    bench.compare("third", work, control, check=nothing, at_least={"b": 0.6})
    del lines[:]
    bench.show_targets()
    assert [line.split() for line in lines] == [
        [],
        ["target", "of", "against", "wanted", "got"],
        ["first", "-", "<=", "7.5", "us", "8", "us", "not", "met"],
        ["first", "a", ">=", "1.9x", "2.00x", "(2.00", "to", "2.00)", "met"],
        ["third", "b", ">=", "0.6x", "0.50x", "(0.50", "to", "0.50)", "not", "met"],
    ]


def test_without_a_target_there_is_no_table():
    bench, lines = bench_on(Clock())
    bench.show_targets()
    assert lines == []


def test_a_quick_run_has_the_sizes_and_targets_of_a_full_one_and_fewer_rounds():
    full, quick, smoke = (Bench(kind=kind, write=nothing_of) for kind in ("full", "quick", "smoke"))
    assert [bench.pick(100, 1) for bench in (full, quick, smoke)] == [100, 100, 1]
    assert [bench.pick(100, 1, quick=10) for bench in (full, quick, smoke)] == [100, 10, 1]
    assert full.effort.rounds_min > quick.effort.rounds_min > smoke.effort.rounds_min
    clock = Clock()
    bench = Bench(kind="quick", clock=clock, write=nothing_of)
    figure = bench.compare("x", clock.work("s", 1), {"c": clock.work("c", 1)}, check=nothing, at_most=1e-9)
    assert figure.met is False


def test_a_smoke_run_has_no_targets():
    bench = Bench(kind="smoke", write=nothing_of)
    figure = bench.compare("x", nothing, {"c": nothing}, check=nothing, at_most=1e-9, at_least={"c": 1e9})
    assert figure.targets() == []
    assert figure.met is None
    assert figure.controls["c"].met is None
    assert figure.rounds == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_disabled_and_restored(enabled):
    seen = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        Bench(kind="smoke", write=nothing_of).compare(
            "x", lambda: seen.append(gc.isenabled()), {"c": nothing}, check=nothing
        )
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)


def test_a_failed_case_is_recorded_and_the_next_one_runs(capsys):
    changes = []
    bench = Bench(kind="smoke", write=nothing_of, on_change=lambda: changes.append(bench.as_json()))
    with bench.case("first"):
        raise ValueError("no such shape")
    with bench.case("second"):
        bench.compare("second", nothing, {"c": nothing}, check=nothing)
    assert bench.failures == [{"name": "first", "error": "ValueError: no such shape"}]
    assert [(len(each["failures"]), len(each["figures"])) for each in changes] == [(1, 0), (1, 1)]
    assert "raise ValueError" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), bench.case("third"):
        raise KeyboardInterrupt
    assert len(bench.failures) == 1


def test_a_job_with_a_timer_is_timed_by_it():
    clock = Clock()
    bench, _ = bench_on(clock)

    def timer(run):
        run()
        return 0.25

    job = Job(clock.work("s", 6), calls=5, timer=timer)
    figure = bench.compare("x", job, {"c": Job(clock.work("c", 2))}, check=nothing)
    assert figure.subject == Spread(0.05, 0.05, 0.05)
    assert figure.controls["c"].time == Spread(2, 2, 2)
    assert clock.order.count("s") == 4


def nothing_of(_line):
    pass
