"""Layers of a cache that are still being loaded on a stream of their own."""

from __future__ import annotations

import threading

from pagecore.arrays.cuda.protocol import Event, Runtime
from pagecore.cache.layers.groups import Layer
from pagecore.cache.staging.tables import Staging


class LayerEvents:
    """An event for each layer that is being loaded; implements `Arrivals` of the cache's store.

    Layer n can compute while layer n + 1 loads: the accessors of the cache wait for the event of their layer only.

    Attributes
    ----------
    stream : int
        Stream of all loads, of every tier of the cache: the newest event of a layer comes after the earlier ones.
    """

    def __init__(self, staging: Staging, runtime: Runtime) -> None:
        self._staging, self._runtime = staging, runtime
        self.stream = runtime.make_stream(staging.device)
        self._events: dict[tuple[bool, int, int], Event] = {}
        # An event leaves `_events` once the stream waits for it: a thread that finds none may launch.
        self._lock = threading.Lock()

    def note(self, layer: Layer, event: Event) -> None:
        """Let work on a layer wait for an event of `stream`, instead of an earlier one."""
        with self._lock:
            self._events[_key(layer)] = event

    def wait(self, layer: Layer) -> None:
        """Make later work of the cache's stream wait for a layer."""
        if not self._events:
            return
        with self._lock:
            event = self._events.get(_key(layer))
            if event is not None:
                self._staging.refuse_captured(self._staging.stream)
                self._runtime.wait_event(self._staging.stream, event)
                del self._events[_key(layer)]

    def wait_all(self) -> None:
        """Make later work of the cache's stream wait for all layers."""
        if not self._events:
            return
        with self._lock:
            self._staging.refuse_captured(self._staging.stream)
            for event in self._events.values():
                self._runtime.wait_event(self._staging.stream, event)
            self._events.clear()


def _key(layer: Layer) -> tuple[bool, int, int]:
    return layer.keeps_state, layer.group, layer.index
