"""The bodies of tests/cuda/swap.py."""

from tests.cuda.swap import *  # noqa: F403
