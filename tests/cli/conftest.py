"""Fixtures of the tests of several commands."""

import pytest

from tests.cli.command_line import write_trace


@pytest.fixture
def trace(tmp_path):
    """Write a trace of eight requests that arrive at once."""
    lines = [
        {"timestamp": 0, "input_length": 100 + number, "output_length": 9, "hash_ids": [number]} for number in range(8)
    ]
    return write_trace(tmp_path / "trace.jsonl", lines)
