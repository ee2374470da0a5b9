"""The replay: a recorded trace through the scheduler and a cache, with real attention where it is wanted."""

from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.replayer import replay
from pagecore.serving.replay.report import ReplayReport

__all__ = ["ReplayOptions", "ReplayReport", "replay"]
