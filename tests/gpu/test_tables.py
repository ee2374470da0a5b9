"""The bodies of tests/cuda/tables.py."""

from tests.cuda.tables import *  # noqa: F403
