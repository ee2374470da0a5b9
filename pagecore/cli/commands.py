"""The commands; each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from pagecore.cli.metrics import served_metrics
from pagecore.cli.outcomes import REFUSED, WRONG, fail
from pagecore.cli.output import (
    check_distinct,
    check_writable,
    print_columns,
    print_table,
    recorder,
    require,
    save_plot,
    watched,
    write_json,
)
from pagecore.serving.info import info_rows
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.scheduling.reuse import POLICIES

if TYPE_CHECKING:
    from pagecore.serving.pictures import Timeline, Watcher
    from pagecore.serving.replay import ReplayReport

UPDATE_STEPS = 64
DEMO_MODELS = ("dense", "hybrid")


def show_info(_arguments: argparse.Namespace) -> int:
    """Print versions and capabilities of this machine and build."""
    for name, value in info_rows():
        print(f"{name:<16} {value}")
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Serve the chats of the demo, and verify every token."""
    require("demo", "rich")
    timeline = recorder(arguments.plot)
    from pagecore.serving.demo import DemoConfig, demo
    from pagecore.serving.tables import demo_rows

    configure = DemoConfig.hybrid if arguments.model == "hybrid" else DemoConfig
    with watched(arguments.live, timeline) as (bar, watchers):
        tasks = {"serve": bar.add_task("serving", total=None), "verify": bar.add_task("verifying", total=None)}
        report = demo(
            configure(seed=arguments.seed, swap=arguments.swap, host=arguments.host, evict=arguments.evict),
            lambda stage, done, total: bar.update(tasks[stage], completed=done, total=total),
            watchers,
        )
    model = f" --model {arguments.model}" if arguments.model != DEMO_MODELS[0] else ""
    print_table(f"pagecore demo{model}", demo_rows(report))
    swap = " --swap" if arguments.swap else ""
    host = f" --host {arguments.host}" if arguments.host is not None else ""
    evict = f" --evict {arguments.evict}" if arguments.evict != POLICIES[0] else ""
    save_plot(timeline, arguments.plot, f"pagecore demo{model} --seed {arguments.seed}{swap}{host}{evict}")
    if not report.verdict.passed:
        wrong = report.verdict.wrong or ["no token was generated"]
        for line in wrong[:10]:
            print(line, file=sys.stderr)
        return fail(f"verification found {len(wrong)} errors in {report.verdict.tokens} tokens", WRONG)
    print("all tokens verified")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a trace."""
    require("replay", "rich")
    names = {field.name for field in fields(ReplayOptions)}
    options = ReplayOptions(**{name: value for name, value in vars(arguments).items() if name in names})
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    timeline = recorder(arguments.plot)
    outputs = {"--json": arguments.json, "--plot": arguments.plot}
    check_distinct(outputs, trace=arguments.trace, configs=[arguments.model])
    with served_metrics(arguments.metrics_port) as exporting:
        report = _replay_with_progress(arguments.trace, options, arguments.live, timeline, exporting)
    from pagecore.serving.tables import replay_rows

    print_table(f"pagecore replay {arguments.trace}", replay_rows(report))
    if arguments.json is not None:
        write_json(arguments.json, report)
    save_plot(timeline, arguments.plot, f"pagecore replay {Path(arguments.trace).name}")
    if report.requests_refused:
        fail(f"{report.requests_refused} requests were refused; the first: {report.first_refusal}", REFUSED)
        if not report.requests_finished:
            return REFUSED
    if not report.passed:
        return fail("attention differs from float64 by more than float32 allows, or no row was checked", WRONG)
    return 0


def _replay_with_progress(
    trace: str, options: ReplayOptions, is_live: bool, timeline: Timeline | None, exporting: list[Watcher]
) -> ReplayReport:
    from pagecore.serving.replay import replay

    with watched(is_live, timeline) as (bar, watchers):
        task = bar.add_task("replaying", total=None)
        steps = 0

        def advance(done: int, total: int | None) -> None:
            # Drawing the bar takes about as long as one step of the index, so update it once in many steps.
            nonlocal steps
            steps += 1
            if steps % UPDATE_STEPS == 0:
                bar.update(task, completed=done, total=total)

        return replay(trace, options, advance, [*watchers, *exporting])


def list_families() -> None:
    """Print the supported values of `model_type`."""
    from pagecore.serving.plan_tables import family_lines

    print("\n".join(family_lines()), flush=True)


def show_plan(arguments: argparse.Namespace) -> int:
    """Print the blocks, tokens and requests of a model that fit into a memory."""
    require("plan", "rich")
    from pagecore.serving.plan_tables import class_columns, context_columns, group_columns, plan_rows, state_columns
    from pagecore.serving.planner import DeviceOptions, plan_model

    if arguments.json is not None:
        check_writable("--json", arguments.json)
    given = {field.name: getattr(arguments, field.name) for field in fields(DeviceOptions)}
    chosen = {name: value for name, value in given.items() if value is not None}
    plan = plan_model(
        arguments.model,
        arguments.memory,
        device_memory=arguments.device_memory,
        options=DeviceOptions(**chosen) if chosen else None,
        ranks=arguments.ranks,
        block_size=arguments.block_size,
        context=arguments.context,
        state_ratio=arguments.state_ratio,
        checkpoint_format=arguments.checkpoint_format,
        dtype=arguments.dtype,
        format=None if arguments.kv_format == "none" else arguments.kv_format,
        value_format=arguments.value_format,
    )
    check_distinct({"--json": arguments.json}, configs=[arguments.model, arguments.draft_model])
    print_table(f"pagecore plan {arguments.model}", plan_rows(plan))
    tables = {"memory": class_columns(plan), "groups": group_columns(plan), "states": state_columns(plan)}
    for title, (headings, lines) in tables.items():
        if lines:
            print_columns(title, headings, lines)
    print_columns("concurrent requests", *context_columns(plan))
    for advice in () if plan.device is None else plan.device.advice:
        print(f"advice: {advice.text}{'' if advice.suffices else ', which does not suffice alone'}")
    if arguments.json is not None:
        write_json(arguments.json, plan)
    return 0
