"""What the tests of several commands need."""

import pytest

from tests.cli.command_line import write_trace


@pytest.fixture
def trace(tmp_path):
    """Eight requests that arrive at once."""
    lines = [
        {"timestamp": 0, "input_length": 100 + number, "output_length": 9, "hash_ids": [number]} for number in range(8)
    ]
    return write_trace(tmp_path / "trace.jsonl", lines)
