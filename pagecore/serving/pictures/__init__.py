"""Pictures of a run: what is recorded of it, drawn when it is over or shown while it is under way."""

from pagecore.serving.pictures.timeline import Timeline, Watcher

__all__ = ["Timeline", "Watcher"]
