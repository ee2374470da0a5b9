"""The bodies of tests/cuda/plan_twin.py."""

from tests.cuda.plan_twin import *  # noqa: F403
