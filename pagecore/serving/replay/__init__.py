"""Replay of a recorded trace through the scheduler and a cache, optionally with real attention."""

from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.replayer import replay
from pagecore.serving.replay.report import ReplayReport

__all__ = ["ReplayOptions", "ReplayReport", "replay"]
