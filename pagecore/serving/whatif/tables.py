"""Tables of a what-if."""

from __future__ import annotations

import numpy as np

from pagecore.serving.tables import human_bytes
from pagecore.serving.whatif.page import curve_name
from pagecore.serving.whatif.report import WhatIf

Columns = tuple[list[str], list[list[str]]]


def summary_rows(result: WhatIf) -> list[tuple[str, str]]:
    """Return the facts of the trace."""
    skipped = [("rows skipped", f"{result.num_skipped:,}, without prompt tokens")] if result.num_skipped else []
    return [
        ("requests", f"{result.num_requests:,}"),
        *skipped,
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("longest prompt", human_bytes(result.longest_request)),
        ("all distinct blocks" if result.bytes_per_token else "all states", human_bytes(result.unbounded_memory)),
        ("hit rate without eviction", f"{result.unbounded_hit_rate:.2%}"),
    ]


def curve_columns(result: WhatIf, index: int, most: int) -> tuple[str, list[str], list[list[str]]]:
    """Return title, headings and lines of a curve, at `most` of its sizes."""
    curve = result.curves[index]
    which = np.unique(np.linspace(0, len(curve.memory) - 1, min(most, len(curve.memory))).round().astype(int))
    lines = [
        [
            human_bytes(curve.memory[i]),
            f"{curve.blocks[i]:,}",
            f"{curve.hit_rate[i]:.2%}",
            f"{curve.hit_tokens[i]:,}",
            _seconds(curve.saved_seconds[i]),
            f"{curve.refused[i]:,}",
        ]
        for i in which
    ]
    headings = [
        "memory",
        "blocks" if result.bytes_per_token else "state slots",
        "hit rate",
        "tokens found",
        "prefill seconds saved",
        "requests refused",
    ]
    return curve_name(result, index), headings, lines


def _seconds(seconds: float) -> str:
    """Format seconds, with a decimal below 100."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def tier_columns(result: WhatIf) -> Columns:
    """Return headings and lines of the tiers."""
    lines = [[t.medium, human_bytes(t.memory), f"{t.hit_tokens:,}", f"{t.hit_rate:.2%}"] for t in result.tiers]
    return ["tier", "size", "tokens found here", "share"], lines
