"""The bodies of tests/cuda/scrub.py."""

from tests.cuda.scrub import *  # noqa: F403
