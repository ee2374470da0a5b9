"""The bodies of tests/cuda/cache.py."""

from tests.cuda.cache import *  # noqa: F403
