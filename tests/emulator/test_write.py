"""The bodies of tests/cuda/write.py."""

from tests.cuda.write import *  # noqa: F403
