"""The bodies of tests/cuda/refusals.py."""

from tests.cuda.refusals import *  # noqa: F403
