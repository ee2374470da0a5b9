"""Figures: spreads of times and ratios with their targets, as text and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of a quantity over the rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        return cls(values[0], statistics.median(values), values[-1])

    def scaled(self, factor: float) -> Spread:
        return Spread(self.min * factor, self.median * factor, self.max * factor)


@dataclass(frozen=True, slots=True)
class Target:
    """A target of a figure, against a control or absolute, and the result, as text."""

    figure: str
    against: str
    wanted: str
    got: str
    met: bool


@dataclass(frozen=True, slots=True)
class Control:
    """A control's time, the subject's speed-up over it, and the target `at_least` of that ratio."""

    time: Spread
    ratio: Spread
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.at_least is None else self.ratio.median >= self.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A subject and its controls. Times are seconds a call, shown in `unit` divided by the `per` things in a call.

    `at_most` is the target of the subject's median in that unit. `nbytes` is the number of bytes that a call moves, and
    `gb_per_s_at_least` the target of its rate. `flop` is the number of operations of a call. `sizes` goes to the JSON.
    A missed target is shown and fails nothing.
    """

    name: str
    subject: Spread
    controls: Mapping[str, Control]
    rounds: int
    unit: str = "us"
    per: int = 1
    each: str = "call"
    nbytes: int | None = None
    flop: int | None = None
    at_most: float | None = None
    gb_per_s_at_least: float | None = None
    sizes: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.at_most is not None and self.gb_per_s_at_least is not None:
            raise ValueError(
                f"{self.name!r} has two targets; set at_most or gb_per_s_at_least, since a rate implies a time"
            )

    @property
    def met(self) -> bool | None:
        if self.gb_per_s_at_least is not None:
            return self.gb_per_s(self.subject) >= self.gb_per_s_at_least
        return None if self.at_most is None else self._in_unit(self.subject).median <= self.at_most

    def lines(self) -> list[str]:
        """Return the subject's line, and one for each control."""
        wanted = self._wanted()
        target = f"target {wanted}: {_verdict(self.met)}" if wanted else ""
        lines = [f"  {self.name:<52} {self._shown(self.subject)}   {target}".rstrip()]
        for name, control in self.controls.items():
            ratio = control.ratio
            shown = f"{ratio.median:6.2f}x ({ratio.min:.2f} to {ratio.max:.2f})"
            target = "" if control.at_least is None else f"target >= {control.at_least:g}x: {_verdict(control.met)}"
            lines.append(f"      {name:<48} {self._shown(control.time)}   {shown}   {target}".rstrip())
        return lines

    def targets(self) -> list[Target]:
        """Return every target of the figure: its own, and those of the ratios to its controls."""
        found = []
        if self.met is not None:
            rate = self.gb_per_s_at_least is not None
            median = self.gb_per_s(self.subject) if rate else self._in_unit(self.subject).median
            found.append(
                Target(self.name, "", self._wanted(), f"{median:.3g} {'GB/s' if rate else self._unit}", self.met)
            )
        for name, control in self.controls.items():
            if control.at_least is not None and control.met is not None:
                got = f"{control.ratio.median:.2f}x ({control.ratio.min:.2f} to {control.ratio.max:.2f})"
                found.append(Target(self.name, name, f">= {control.at_least:g}x", got, control.met))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return {
            "name": self.name,
            "sizes": dict(self.sizes),
            "unit": self.unit,
            "each": self.each,
            "rounds": self.rounds,
            "subject": self._times(self.subject)
            | _target("at_most", self.at_most, self.met)
            | _target("gb_per_s_at_least", self.gb_per_s_at_least, self.met),
            "controls": {
                name: self._times(control.time)
                | {"ratio": asdict(control.ratio)}
                | _target("at_least", control.at_least, control.met)
                for name, control in self.controls.items()
            },
        }

    @property
    def _unit(self) -> str:
        return self.unit if self.each == "call" else f"{self.unit} a {self.each}"

    def _wanted(self) -> str:
        """Return the subject's own target as text; "" without one."""
        if self.gb_per_s_at_least is not None:
            return f">= {self.gb_per_s_at_least:g} GB/s"
        return "" if self.at_most is None else f"<= {self.at_most:g} {self._unit}"

    def _in_unit(self, seconds: Spread) -> Spread:
        return seconds.scaled(PER_SECOND[self.unit] / self.per)

    def gb_per_s(self, seconds: Spread) -> float:
        """Return the median rate at which a call moves its bytes."""
        assert self.nbytes is not None, f"{self.name!r} has no nbytes"
        return self.nbytes / seconds.median / 1e9

    def _times(self, seconds: Spread) -> dict[str, Any]:
        rate = {} if self.nbytes is None else {"gb_per_s": self.gb_per_s(seconds)}
        if self.flop is not None:
            rate["tflop_per_s"] = self.flop / seconds.median / 1e12
        return asdict(self._in_unit(seconds)) | rate

    def _shown(self, seconds: Spread) -> str:
        time = self._in_unit(seconds)
        digits = 2 if time.median < 10 else 1 if time.median < 1000 else 0
        spread = f"({time.min:.{digits}f} to {time.max:.{digits}f})"
        rate = "" if self.nbytes is None else f" {self.gb_per_s(seconds):5.1f} GB/s"
        if self.flop is not None:
            rate += f" {self.flop / seconds.median / 1e12:5.1f} TFLOP/s"
        return f"{f'{time.median:9.{digits}f} {self._unit} {spread}':<42}{rate}"


def table_of(targets: Sequence[Target]) -> list[str]:
    """Return the lines of a table of targets; [] without targets."""
    if not targets:
        return []
    rows = [("target of", "against", "wanted", "got", "")]
    rows += [(each.figure, each.against or "-", each.wanted, each.got, _verdict(each.met)) for each in targets]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "",
        *(
            "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
    ]


def _verdict(met: bool | None) -> str:
    return "met" if met else "not met"


def _target(name: str, value: float | None, met: bool | None) -> dict[str, Any]:
    return {} if value is None else {"target": {name: value, "met": met}}
