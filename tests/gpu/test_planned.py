"""The bodies of tests/cuda/planned.py."""

from tests.cuda.planned import *  # noqa: F403
