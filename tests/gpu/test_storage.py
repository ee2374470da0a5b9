"""The bodies of tests/cuda/storage.py."""

from tests.cuda.storage import *  # noqa: F403
