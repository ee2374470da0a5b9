"""The bodies of tests/cuda/independent.py."""

from tests.cuda.independent import *  # noqa: F403
