"""The bodies of tests/cuda/far.py."""

from tests.cuda.far import *  # noqa: F403
