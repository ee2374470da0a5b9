"""The bodies of tests/cuda/failures.py."""

from tests.cuda.failures import *  # noqa: F403
