"""The bodies of tests/cuda/sequences.py."""

from tests.cuda.sequences import *  # noqa: F403
