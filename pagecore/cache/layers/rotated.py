"""Layers with rotated keys or values: `write` transforms what another LayerOps stores, and `attend` its queries.

key   ── rotate ──► stored        scores: (R k).(R q) = k.q, for the orthogonal R of each head
query ── rotate ──► attention
value ── rotate ──► stored ──► attention ── rotate ──► output        R is its own inverse
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from pagecore.arrays import Tensor, as_tensor, empty, like
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.tensors.results import finished_result, new_result
from pagecore.arrays.tensors.streams import stream_handle
from pagecore.cache.layers.inputs import BatchGroup, StepInputs
from pagecore.cache.layers.operations import AttentionOps, LayerOps
from pagecore.ops import AttentionPlan
from pagecore.ops.arguments._arguments import float_array
from pagecore.ops.codecs._codecs import rotate_rows
from pagecore.storage import KVPool, Spec
from pagecore.storage.specs.rotation import check_rotation, rotation_of


class RotatedOps(LayerOps):
    """Operations of a spec with rotations, around those of its planes."""

    def __init__(self, spec: Spec, inner: AttentionOps) -> None:
        self._inner = inner
        self._key_dim, self._value_dim = inner.key_dim, inner.value_dim
        self._rotates_keys = rotation_of(spec, "key") is not None
        self._rotates_values = rotation_of(spec, "value") is not None
        check_rotation("key", rotation_of(spec, "key"), "the dim of plane key", self._key_dim)
        check_rotation("value", rotation_of(spec, "value"), "the dim of plane value", self._value_dim)
        self.attends_to_trees = inner.attends_to_trees

    @property
    def value_dim(self) -> int:
        """As of the operations that this one changes."""
        return self._value_dim

    def plan(self) -> AttentionPlan | None:
        """Return the plan of the operations that this one changes: attention itself is the same."""
        return self._inner.plan()

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: StepInputs, group: BatchGroup, stream: object
    ) -> None:
        """Scatter rotated keys and values to the slots of the step's tokens."""
        given = {"key": key, "value": value}
        rotated = {"key": self._rotates_keys, "value": self._rotates_values}
        dims = {"key": self._key_dim, "value": self._value_dim}
        tensors = {name: float_array(array, name) for name, array in given.items()}
        device = pool.plane("key", index).device
        if not all(is_rows(tensor, dims[name], device) for name, tensor in tensors.items()):
            self._inner.write(pool, index, key, value, batch, group, stream)  # which refuses them
            return
        handle = work_stream(stream, key, tensors["key"])
        stream = stream if handle is None else handle
        with ExitStack() as lent:
            for name in (name for name, does in rotated.items() if does):
                rows = lent.enter_context(batch.scratch.lent(tensors[name], handle))
                rotate_rows(given[name], name, rows, stream)
                given[name] = rows
            self._inner.write(pool, index, given["key"], given["value"], batch, group, stream)

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Return the attention of rotated queries, rotated back, in the framework of the query."""
        tensor = float_array(query, "query")
        if not is_rows(tensor, self._key_dim, pool.plane("key", index).device):
            return self._inner.attend(pool, index, query, batch, group, options)  # which refuses it
        handle = work_stream(options.get("stream"), query, tensor)
        if handle is not None:
            options = {**options, "stream": handle}
        out = options.get("out")
        result = self._new_output(tensor, query, handle) if out is None else float_array(out, "out")
        options = {**options, "out": result}
        with ExitStack() as lent:
            if self._rotates_keys:
                rows = lent.enter_context(batch.scratch.lent(tensor, handle))
                rotate_rows(query, "query", rows, options.get("stream"))
                tensor = rows
            found = self._inner.attend(pool, index, tensor, batch, group, options)
        if self._rotates_values:
            rotate_rows(result, "out", result, options.get("stream"))
        given = returned(result, query, handle) if out is None else out
        return (given, returned(as_tensor(found[1]), query, handle)) if isinstance(found, tuple) else given

    def _new_output(self, tensor: Tensor, query: Any, handle: int | None) -> Tensor:
        """Return an array for the output, which `returned` makes one of the framework of the query."""
        shape = (*tensor.shape[:2], self._value_dim)
        if handle is None:
            return empty(shape, tensor.dtype)
        device = device_index(tensor.device)
        assert device is not None
        return new_result(shape, tensor.dtype, query, device, handle)


def is_rows(tensor: Tensor, dim: int, device: str) -> bool:
    """Return True for rows ``[tokens, heads, dim]`` on a device."""
    return tensor.ndim == 3 and tensor.shape[2] == dim and tensor.device == device


def work_stream(stream: object, example: Any, tensor: Tensor) -> int | None:
    """Return the handle of the stream of a call; None on the host."""
    device = device_index(tensor.device)
    return None if device is None else stream_handle(stream, example, device)


def returned(result: Tensor, query: Any, handle: int | None) -> Any:
    """Return a result as an array of the framework of the query."""
    return like(result, query) if handle is None else finished_result(result, query, handle)
