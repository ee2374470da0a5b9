"""Page of a what-if: one HTML file with its data, styles and script, which needs no network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from pagecore.serving.tables import human_bytes
from pagecore.serving.whatif.report import WhatIf


def save_page(result: WhatIf, path: Path) -> None:
    """Write the page.

    Charts of hit rate and of seconds saved over memory, of distinct blocks and of hit rates over time. Moving the
    pointer shows values, dragging zooms, a double click shows everything; the zoom is part of the address.
    """
    path.write_text(page_of(result))


def page_of(result: WhatIf) -> str:
    """Return the page as text."""
    template = files("pagecore.serving.whatif").joinpath("page.html").read_text()
    data = json.dumps(_data(result), separators=(",", ":")).replace("<", "\\u003c")
    title = f"What if: {result.trace}"
    return (
        template.replace("{{title}}", html.escape(title))
        .replace("{{facts}}", _facts(result))
        .replace("{{tiers}}", _tiers(result))
        .replace("{{data}}", data)
    )


def curve_name(result: WhatIf, index: int) -> str:
    """Return the name of a curve in legends: what distinguishes it from the others."""
    curve = result.curves[index]
    parts = [curve.policy if curve.method == "exact" else f"{curve.policy} ({curve.method})"]
    if len({each.block_size for each in result.curves}) > 1:
        parts.append(f"blocks of {curve.block_size}")
    return ", ".join(parts)


def _data(result: WhatIf) -> list[dict[str, object]]:
    """Return the charts: title, axes, and lines of points."""
    names = [curve_name(result, i) for i in range(len(result.curves))]
    charts: list[dict[str, object]] = [
        {
            "id": "rate",
            "title": "Hit rate over memory",
            "x": "bytes",
            "y": "share",
            "mark": result.unbounded_hit_rate,
            "lines": [
                {"name": name, "x": curve.memory, "y": curve.hit_rate}
                for name, curve in zip(names, result.curves, strict=True)
            ],
        },
        {
            "id": "saved",
            "title": f"Prefill seconds saved over memory, at {result.prefill_rate:,.0f} tokens a second",
            "x": "bytes",
            "y": "seconds",
            "lines": [
                {"name": name, "x": curve.memory, "y": curve.saved_seconds}
                for name, curve in zip(names, result.curves, strict=True)
            ],
        },
    ]
    if result.timeline is None:
        return charts
    time, size = result.timeline.seconds, result.curves[0].block_size * result.bytes_per_token
    if size:
        charts.append(
            {
                "id": "blocks",
                "title": "Distinct blocks over time",
                "x": "time",
                "y": "bytes",
                "lines": [{"name": "distinct blocks", "x": time, "y": [n * size for n in result.timeline.num_blocks]}],
            }
        )
    charts.append(
        {
            "id": "over_time",
            "title": "Hit rate over time",
            "x": "time",
            "y": "share",
            "lines": [
                {"name": human_bytes(memory), "x": time, "y": rates}
                for memory, rates in zip(result.timeline_memory, result.timeline.hit_rates, strict=True)
            ],
        }
    )
    return charts


def _facts(result: WhatIf) -> str:
    facts = [
        ("requests", f"{result.num_requests:,}"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("KV bytes of a token", f"{result.bytes_per_token:,}"),
        ("longest prompt", human_bytes(result.longest_request)),
        ("all distinct blocks", human_bytes(result.unbounded_memory)),
        ("hit rate without eviction", f"{result.unbounded_hit_rate:.2%}"),
    ]
    return "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts)


def _tiers(result: WhatIf) -> str:
    if not result.tiers:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(tier.medium)}</td><td>{human_bytes(tier.memory)}</td>"
        f"<td>{tier.hit_tokens:,}</td><td>{tier.hit_rate:.2%}</td></tr>"
        for tier in result.tiers
    )
    head = "<tr><th>tier</th><th>size</th><th>tokens found here</th><th>share</th></tr>"
    return f"<h2>Tiers</h2><table>{head}{rows}</table>"
