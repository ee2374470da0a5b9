"""Constants and helpers of the tests of Guard."""

from pagecore.tiers.guard import Deadline
from tests.tiers.blocks import wait

NBYTES = 10_000
SOON = Deadline(0.05, 1e12)


def stored(guard, blocks, keys):
    done = wait(guard, guard.submit_store(keys, blocks.pieces()))
    assert done.ok.all()
    assert done.error is None
