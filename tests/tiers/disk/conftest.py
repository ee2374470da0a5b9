"""A store of 8 slots, whose invariants are checked after the test."""

import pytest

from tests.tiers.disk.kit import open_store


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, slots=8) as made:
        yield made
        made.check_invariants()
