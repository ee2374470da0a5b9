"""The bodies of tests/cuda/merge.py."""

from tests.cuda.merge import *  # noqa: F403
