"""The bodies of tests/cuda/debug.py."""

from tests.cuda.debug import *  # noqa: F403
