"""Fixtures of the tests of Guard: each kind of store, and blocks in memory."""

import pytest

from tests.tiers.blocks import Blocks
from tests.tiers.guard.kit import NBYTES

KINDS = [{"verifies": True}, {"verifies": False}, {"verifies": False, "writes_late": True}, {"writes_late": True}]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(f"{k}" if v else f"not_{k}" for k, v in kind.items()))
def kind(request):
    return request.param


@pytest.fixture
def blocks():
    blocks = Blocks(8, NBYTES)
    blocks.fill(0)
    return blocks
