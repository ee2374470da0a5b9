"""The bodies of tests/cuda/staging.py."""

from tests.cuda.staging import *  # noqa: F403
