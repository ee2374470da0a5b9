"""What a figure is: spreads of times and of ratios, the targets beside them, as lines to read and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of one quantity over the rounds."""

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
class Control:
    """A control's time, and how many times faster than it the subject is; `at_least` is the target of the ratio."""

    time: Spread
    ratio: Spread
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.at_least is None else self.ratio.median >= self.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A subject beside its controls; times in seconds a call, shown in `unit` for each of `per` things of a call.

    `at_most` is the target of the subject's median in that unit; `nbytes` is what a call moves. `sizes` goes to the
    JSON. A target that is missed is shown and fails nothing.
    """

    name: str
    subject: Spread
    controls: Mapping[str, Control]
    rounds: int
    unit: str = "us"
    per: int = 1
    each: str = "call"
    nbytes: int | None = None
    at_most: float | None = None
    sizes: Mapping[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.at_most is None else self._in_unit(self.subject).median <= self.at_most

    def lines(self) -> list[str]:
        """The figure as text: the subject's line, and one for each control."""
        unit = self.unit if self.each == "call" else f"{self.unit} a {self.each}"
        target = "" if self.at_most is None else f"target <= {self.at_most:g} {unit}: {_verdict(self.met)}"
        lines = [f"  {self.name:<52} {self._shown(self.subject, unit)}   {target}".rstrip()]
        for name, control in self.controls.items():
            ratio = control.ratio
            shown = f"{ratio.median:6.2f}x ({ratio.min:.2f} to {ratio.max:.2f})"
            target = "" if control.at_least is None else f"target >= {control.at_least:g}x: {_verdict(control.met)}"
            lines.append(f"      {name:<48} {self._shown(control.time, unit)}   {shown}   {target}".rstrip())
        return lines

    def as_json(self) -> dict[str, Any]:
        """The figure as plain values."""
        return {
            "name": self.name,
            "sizes": dict(self.sizes),
            "unit": self.unit,
            "each": self.each,
            "rounds": self.rounds,
            "subject": self._times(self.subject) | _target("at_most", self.at_most, self.met),
            "controls": {
                name: self._times(control.time)
                | {"ratio": asdict(control.ratio)}
                | _target("at_least", control.at_least, control.met)
                for name, control in self.controls.items()
            },
        }

    def _in_unit(self, seconds: Spread) -> Spread:
        return seconds.scaled(PER_SECOND[self.unit] / self.per)

    def _times(self, seconds: Spread) -> dict[str, Any]:
        rate = {} if self.nbytes is None else {"gb_per_s": self.nbytes / seconds.median / 1e9}
        return asdict(self._in_unit(seconds)) | rate

    def _shown(self, seconds: Spread, unit: str) -> str:
        time = self._in_unit(seconds)
        digits = 2 if time.median < 10 else 1 if time.median < 1000 else 0
        spread = f"({time.min:.{digits}f} to {time.max:.{digits}f})"
        rate = "" if self.nbytes is None else f" {self.nbytes / seconds.median / 1e9:5.1f} GB/s"
        return f"{f'{time.median:9.{digits}f} {unit} {spread}':<42}{rate}"


def _verdict(met: bool | None) -> str:
    return "met" if met else "not met"


def _target(name: str, value: float | None, met: bool | None) -> dict[str, Any]:
    return {} if value is None else {"target": {name: value, "met": met}}
