"""Tables of the reports of the demo and the replay, and formatting of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.reuse import NO_REUSE

if TYPE_CHECKING:
    from pagecore.serving.demo import DemoReport
    from pagecore.serving.replay import ReplayReport
    from pagecore.serving.replay.tiered import TierReport

__all__ = ["demo_rows", "human_bytes", "replay_rows", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"


def human_bytes(count: float) -> str:
    """Format bytes with a binary unit: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit takes every count")


def sparkline(shares: Sequence[float | None], width: int = 40) -> str:
    """Draw shares between 0 and 1 as at most `width` bars, each the mean of adjacent shares; None is a gap."""
    if not shares:
        return ""
    width = min(width, len(shares))
    bars = []
    for column in range(width):
        part = shares[column * len(shares) // width : (column + 1) * len(shares) // width]
        known = [share for share in part if share is not None]
        bars.append(BARS[min(int(sum(known) / len(known) * len(BARS)), len(BARS) - 1)] if known else " ")
    return "".join(bars)


def _preemptions(report: DemoReport | ReplayReport) -> str:
    """Format the number of preemptions of each kind."""
    recomputed = report.preemptions - report.swaps
    if not report.swaps:
        return f"{recomputed:,}, all recomputed" if recomputed else "0"
    return f"{report.preemptions:,}: {report.swaps:,} swapped out, {recomputed:,} recomputed"


def _reuse_rows(report: DemoReport | ReplayReport) -> list[tuple[str, str]]:
    """Rows about the prefix cache; none if it was off."""
    if report.evict == NO_REUSE:
        return []
    again = "after preemptions" if getattr(report, "turns", None) is None else "by runs that came back"
    recovered = f", {report.recovered_tokens:,} of these {again}" if report.recovered_tokens else ""
    return [
        (
            "prefix hits",
            f"{report.prefix_hit_tokens:,} of {report.prefix_query_tokens:,} prompt tokens "
            f"({report.prefix_token_hit_rate:.1%})",
        ),
        ("prefill saved", f"{report.saved_prefill_tokens:,} tokens{recovered}"),
        ("evicted", f"{report.evicted_blocks:,} blocks (policy {report.evict})"),
    ]


def _replayed_states(report: ReplayReport) -> list[tuple[str, str]]:
    """Rows about recurrent states; none for a model without them."""
    states = report.states
    if states is None:
        return []
    slots = f"{states.num_states - 1:,} of {human_bytes(states.bytes_per_state)} each"
    rows = [("state slots", f"{slots}, in use mean {states.held_mean:.1%}, peak {states.held_peak:.1%}")]
    if states.num_checkpoints:
        kept = f"{states.num_checkpoints - 1:,} of {human_bytes(states.bytes_per_checkpoint)} each"
        shares = f"mean {states.checkpoints_held_mean:.1%}, peak {states.checkpoints_held_peak:.1%}"
        rows.append(("checkpoint slots", f"{kept}, in use {shares}"))
    if report.evict == NO_REUSE:
        return rows
    return [
        ("blocks matched", f"{states.matched_tokens:,} prompt tokens in cached blocks"),
        ("reused by states", f"{states.hit_tokens:,} of these; {states.share_lost:.1%} lost after the deepest state"),
        *rows,
        ("states evicted", f"{states.evicted_states:,}; at most {states.cached_peak:,} were cached"),
    ]


def _tier_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Rows about the tiers of a replay; none without."""
    tiers = report.tiers
    if tiers is None:
        return []
    total = max(report.prefix_query_tokens, 1)
    hits = [f"{medium} {count:,} ({count / total:.1%})" for medium, count in tiers.hit_tokens.items()]
    rows = [
        ("hits by medium", ", ".join(hits)),
        ("host tier", _host_of(tiers)),
    ]
    for title, moved in (("read", tiers.read_bytes), ("written", tiers.written_bytes)):
        rows.append((f"bytes {title}", ", ".join(f"{name} {human_bytes(count)}" for name, count in moved.items())))
    if tiers.modelled_s:
        times = ", ".join(f"{name} {seconds:,.3f} s" for name, seconds in tiers.modelled_s.items())
        rows.append(("time of reads", f"{times} at the given bandwidths"))
    if len(tiers.read_bytes) > 1:
        late = f", {tiers.late_requests:,} late" if tiers.late_requests else ""
        rows.append(("waited for stores", f"{tiers.waited_s:.1f} s in {tiers.requests:,} requests{late}"))
    if tiers.failed_entries:
        rows.append(("failed entries", f"{tiers.failed_entries:,}, which were computed again or not stored"))
    return rows


def _host_of(tiers: TierReport) -> str:
    """Return the sizes of a host tier, and what it evicted."""
    sizes = [("blocks", tiers.host_blocks, tiers.evicted_host_blocks)]
    sizes.append(("states", tiers.host_states, tiers.evicted_host_states))
    return ", ".join(f"{size - 1:,} {name} ({evicted:,} evicted)" for name, size, evicted in sizes if size)


def _clock_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Rows about the clock of a replay; none without."""
    clock = report.clock
    if clock is None:
        return []
    reading = f", {clock.reading_s:,.1f} s of reads" if clock.reading_s else ""
    rows = [("modelled time", f"{clock.duration_s:,.1f} s, {clock.idle_s:,.1f} s idle{reading}")]
    for title, times in (("first token", clock.first_token_s), ("further tokens", clock.next_token_s)):
        if times["max"]:
            text = ", ".join(f"{name} {seconds * 1000:,.1f} ms" for name, seconds in times.items())
            rows.append((title, text))
    return rows


def _turn_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Rows about the turns of conversations; none without."""
    turns = report.turns
    if turns is None:
        return []
    reused = turns.kept_tokens + turns.found_tokens
    return [
        (
            "turns",
            f"{turns.turns:,} of {turns.conversations:,} conversations; {turns.turns_separate:,} as separate requests",
        ),
        (
            "tokens of turns",
            f"{turns.prompt_tokens:,}, {reused / max(turns.prompt_tokens, 1):.1%} of them reused: "
            f"{turns.kept_tokens:,} kept, {turns.found_tokens:,} found again",
        ),
        (
            "idle",
            f"mean {turns.idle_runs_mean:,.1f} runs with {turns.idle_blocks_mean:,.1f} blocks, peak "
            f"{turns.idle_runs_peak:,} runs, {turns.idle_blocks_peak:,} blocks; given up {turns.reclaimed:,} times",
        ),
    ]


def _rejections(report: ReplayReport) -> list[tuple[str, str]]:
    """Row about a bounded queue; none for one without a bound."""
    if report.requests_rejected is None:
        return []
    return [("requests rejected", f"{report.requests_rejected:,}, which found the queue full")]


def _reuse_over_time(report: ReplayReport) -> list[tuple[str, str]]:
    if report.evict == NO_REUSE:
        return []
    return [
        (
            "hits in blocks",
            f"{report.prefix_hit_blocks:,} of {report.prefix_query_blocks:,} ({report.prefix_block_hit_rate:.1%})",
        ),
        ("hits over time", sparkline(report.prefix_hit_series)),
    ]


def _history(report: DemoReport) -> list[tuple[str, str]]:
    """Row about the history reused by follow-up turns."""
    if not report.follow_ups or report.evict == NO_REUSE:
        return []
    reused = f"{report.history_hit_tokens:,} of {report.history_tokens:,} history tokens reused"
    return [("follow-up turns", f"{report.follow_ups}; {reused}")]


def _state_rows(report: DemoReport) -> list[tuple[str, str]]:
    """Rows about recurrent states; none for a model without them."""
    states = report.states
    if states is None:
        return []
    return [
        ("state slots", f"{states.num_states}, at most {states.peak} of them held"),
        ("state hits", f"{states.hits} of {states.queries} requests"),
        ("checkpoints", f"{states.checkpoints} kept, {states.evicted} evicted"),
    ]


def _host_rows(report: DemoReport) -> list[tuple[str, str]]:
    """Rows about the host tier; none without one."""
    host = report.host
    if host is None:
        return []
    came = f"{host.num_promoted_tokens:,} tokens came back in {host.num_promotions:,} promotions"
    held = f"{host.num_cached_blocks:,} of {host.num_blocks:,} blocks held, {host.num_evicted_blocks:,} evicted"
    return [("host tier", f"{human_bytes(host.nbytes)}: {came}"), ("host blocks", held)]


def demo_rows(report: DemoReport) -> list[tuple[str, str]]:
    """Return the name and value of each line of the demo's table."""
    verdict = report.verdict
    ties = f", {verdict.ties} of them ties in float32" if verdict.ties else ""
    groups = "1 group" if report.num_groups == 1 else f"{report.num_groups} groups"
    oracle = "recurrence and attention from scratch" if report.states else "dense attention"
    return [
        ("requests", f"{report.requests} ({report.sequences} sequences, {report.forks} forked)"),
        ("tokens", f"{report.prompt_tokens:,} prompt, {report.generated_tokens:,} generated"),
        ("steps", f"{report.steps:,} in {report.serve_s:.1f} s"),
        ("blocks", f"{report.num_blocks} of {report.block_size} tokens each, in {groups}"),
        ("peak utilisation", f"{report.utilization_peak:.1%} (mean {report.utilization_mean:.1%})"),
        ("fragmentation", f"{report.fragmentation_mean:.1%} of the slots in held blocks (mean)"),
        *_reuse_rows(report),
        *_history(report),
        *_state_rows(report),
        *_host_rows(report),
        ("copy-on-write", f"{report.copied_blocks} blocks"),
        ("preemptions", _preemptions(report)),
        ("memory", f"{human_bytes(report.nbytes)} for up to {report.running_peak} concurrent sequences"),
        *([("swap space", human_bytes(report.swap_nbytes))] if report.swap_nbytes else []),
        (
            "static caches",
            f"{human_bytes(report.static_nbytes)} for {report.running_peak} sequences of {report.max_length} tokens "
            f"({report.static_nbytes / report.nbytes:.1f}x)",
        ),
        ("checked", f"{verdict.tokens:,} tokens against {oracle} in {report.verify_s:.1f} s{ties}"),
    ]


def replay_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Return the name and value of each line of a replay's table."""
    rate = report.computed_tokens / report.wall_s if report.wall_s else 0.0
    rows = [
        ("requests finished", f"{report.requests_finished:,} of {report.requests_total:,}"),
        ("requests refused", f"{report.requests_refused:,}, too long for the cache"),
        *_rejections(report),
        ("tokens", f"{report.prompt_tokens:,} prompt, {report.generated_tokens:,} generated"),
        ("computed", f"{report.computed_tokens:,} tokens"),
        *_reuse_rows(report),
        *_reuse_over_time(report),
        *_replayed_states(report),
        *_tier_rows(report),
        *_clock_rows(report),
        *_turn_rows(report),
        ("preemptions", _preemptions(report)),
        ("steps", f"{report.steps:,}"),
        ("blocks", f"{report.num_blocks - 1:,} of {report.block_size} tokens each"),
        ("utilisation", f"mean {report.utilization_mean:.1%}, peak {report.utilization_peak:.1%}"),
        ("utilisation over time", sparkline(report.utilization_series)),
        ("fragmentation", f"{report.fragmentation_mean:.2%} of the slots in held blocks (mean)"),
        (
            "index time per step",
            f"p50 {report.index_us_p50:.1f} us, p99 {report.index_us_p99:.1f} us, max {report.index_us_max:.1f} us",
        ),
        ("wall time", f"{report.wall_s:.1f} s, {rate:,.0f} computed tokens per second of it"),
    ]
    if report.num_swap_blocks is not None:
        swap = f"{report.num_swap_blocks - 1:,} blocks, at most {report.swapped_blocks_peak:,} of them in use"
        rows.insert([name for name, _ in rows].index("blocks") + 1, ("swap space", swap))
    if not report.requests_refused:
        del rows[1]
    if report.requests_skipped:
        rows.insert(1, ("rows skipped", f"{report.requests_skipped:,}, without prompt tokens"))
    if report.rows_checked is not None:
        rows.append(("attended", f"{report.rows_attended:,} rows"))
        rows.append(
            (
                "checked",
                f"{report.rows_checked:,} rows against float64, worst relative error {report.max_relative_error:.1e}",
            )
        )
    return rows
