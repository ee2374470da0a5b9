"""Text of messages: values of callers are shown on one short line, whatever their repr does."""

import numpy as np
import pytest

from pagecore.errors import shown


class Silent:
    """An object whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a\nb", r"'a\nb'"),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
        (10**5000, "<int without a short repr>"),
        (Silent(), "<Silent without a short repr>"),
    ],
    ids=["int", "text", "array", "digits", "failing"],
)
def test_a_value_is_shown_on_one_line(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("value", [list(range(1000)), "x" * 1000, np.zeros((50, 3)), {"key": [0] * 99}], ids=type)
def test_a_long_value_is_cut(value):
    assert len(shown(value)) == 80
    assert shown(value).endswith("...")
    assert shown(value)[:5] == repr(value)[:5]
