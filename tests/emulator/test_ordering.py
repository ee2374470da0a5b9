"""The bodies of tests/cuda/ordering.py."""

from tests.cuda.ordering import *  # noqa: F403
