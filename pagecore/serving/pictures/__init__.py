"""Pictures of a run: a timeline that is drawn after the run, and a live block map in the terminal."""

from pagecore.serving.pictures.timeline import Timeline, Watcher

__all__ = ["Timeline", "Watcher"]
