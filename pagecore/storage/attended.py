"""Keys that the queries of a layer see, as far as the layer's spec limits them."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.storage.spec import Spec, window_of


@dataclass(frozen=True, slots=True)
class AttendedKeys:
    """Limits of the keys that a query sees; without any, it sees all keys up to its own.

    Attributes
    ----------
    window : int or None
        Number of keys that a query sees, including its own.
    """

    window: int | None = None

    @property
    def is_limited(self) -> bool:
        """True if keys can be released before the sequence ends."""
        return self.window is not None

    def span(self, step_tokens: int) -> int:
        """Return the most tokens whose keys are held at once while `step_tokens` tokens are computed."""
        assert self.window is not None
        return self.window - 1 + step_tokens


def attended_keys(spec: Spec) -> AttendedKeys:
    """Return the limits of a spec; raise ShapeError for a window below 1."""
    return AttendedKeys(window_of(spec))
