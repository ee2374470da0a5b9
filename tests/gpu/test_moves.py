"""The bodies of tests/cuda/moves.py."""

from tests.cuda.moves import *  # noqa: F403
