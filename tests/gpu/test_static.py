"""The bodies of tests/cuda/static.py."""

from tests.cuda.static import *  # noqa: F403
