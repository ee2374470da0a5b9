"""Options of the tiers of a replay: sizes, places and bandwidths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.checks import as_rate, named
from pagecore.storage import parse_memory
from pagecore.storage.checks import as_tuple, shown
from pagecore.storage.memory.budgets import UNITS

__all__ = ["MEDIA", "TierPlace", "parse_bandwidth", "parse_place"]

MEDIA = ("host", "disk", "remote")
UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class TierPlace:
    """A store of a replay: one that only counts, of `nbytes` (None: unbounded), or a real one at `target`."""

    nbytes: int | None = None
    target: str | None = None


def parse_place(name: str, value: str | int, attend: bool) -> TierPlace:
    """Return the place that a value names: a size, "unbounded", or a folder or URL.

    Raises
    ------
    ShapeError
        A size with an unknown unit, or of 0 bytes.
    UnsupportedOption
        A folder or URL without `attend`, because there are no bytes to write; or a size with it.
    """
    what = "a folder" if name == "disk" else "the URL of a store"
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise UnsupportedOption(f"{name} is {shown(value)}; expected {what}, a size such as '1TiB', or {UNBOUNDED!r}")
    is_size = isinstance(value, int) or value == UNBOUNDED or value[:1].isdigit()
    if is_size and attend:
        raise UnsupportedOption(
            f"{name} is {shown(value)}, a size for a simulation, but attend moves real bytes; give {what}, or drop "
            "attend"
        )
    if is_size:
        nbytes = None if value == UNBOUNDED else named(name, lambda: parse_memory(value))
        if nbytes == 0:
            raise ShapeError(f"{name} is {shown(value)}; expected a size above 0, such as '1TiB', or leave it out")
        return TierPlace(nbytes=nbytes)
    if not attend:
        raise UnsupportedOption(
            f"{name} is {shown(value)}, but a replay without attend has no bytes to write; add attend, or give a size "
            f"for a simulation: one of {', '.join(unit for unit in UNITS if len(unit) == 3)}, or {UNBOUNDED!r}"
        )
    return TierPlace(target=str(value))


def parse_bandwidth(value: Mapping[str, float] | Iterable[str]) -> dict[str, float]:
    """Return bytes per second of each medium; pairs such as "disk=2.5" are in GB/s.

    Raises
    ------
    UnsupportedOption
        A medium other than host, disk and remote, or one that is given twice; text without a number, or neither a
        mapping nor a list of text.
    ShapeError
        A bandwidth outside 1e-6 to 1e15.
    """
    pairs: list[tuple[str, float]] = []
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        for text in as_tuple("bandwidth", value, "a list such as ['disk=2.5'], in GB/s"):
            name, _, number = text.partition("=") if isinstance(text, str) else ("", "", "")
            try:
                pairs.append((name, float(number)))
            except ValueError:
                raise UnsupportedOption(
                    f"bandwidth is {shown(text)}; expected a medium and GB/s, such as 'disk=2.5'"
                ) from None
    found: dict[str, float] = {}
    for name, speed in pairs:
        if not isinstance(name, str) or name not in MEDIA:
            raise UnsupportedOption(f"bandwidth is given for {shown(name)}; the media are {', '.join(MEDIA)}")
        rate = as_rate(f"bandwidth of {name}", speed, "GB/s")
        if name in found:
            raise UnsupportedOption(
                f"bandwidth of {name} is given twice, as {found[name] / 1e9:g} and {rate:g} GB/s; give it once"
            )
        found[name] = rate * 1e9
    return found
