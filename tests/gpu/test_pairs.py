"""The bodies of tests/cuda/pairs.py."""

from tests.cuda.pairs import *  # noqa: F403
