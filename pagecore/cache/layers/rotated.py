"""Layers with rotated keys or values: `write` transforms the rows that another LayerOps stores, `attend` the queries.

key   ── rotate ──► stored        scores: (R k).(R q) = k.q, for the orthogonal R of each head
query ── rotate ──► attention
value ── rotate ──► stored ──► attention ── rotate ──► output        R is its own inverse
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from pagecore.arrays import Tensor, as_tensor
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.exchange.frameworks import is_instance
from pagecore.arrays.tensors.streams import stream_handle
from pagecore.cache.layers.inputs import BatchGroup, StepInputs
from pagecore.cache.layers.operations import AttentionOps, LayerOps
from pagecore.cache.layers.scratch import in_framework
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan
from pagecore.ops.arguments._arguments import float_array
from pagecore.ops.arguments._overlap import shares_memory
from pagecore.ops.codecs._codecs import rotate_rows
from pagecore.ops.cuda.compilation import kernels
from pagecore.storage import CrossSpec, KVPool, Spec
from pagecore.storage.specs.rotation import check_rotation, rotation_of

# The kernel of `hadamard` for each dtype.
KERNELS = {"float32": "hadamard<float>", "float16": "hadamard<pc_half>", "bfloat16": "hadamard<pc_bfloat16>"}


class RotatedOps(LayerOps):
    """Operations of a spec with rotations; those of its planes do the rest."""

    def __init__(self, spec: Spec, inner: AttentionOps) -> None:
        self._inner = inner
        self._key_dim, self._value_dim = inner.key_dim, inner.value_dim
        self._rotates_keys = rotation_of(spec, "key") is not None
        self._rotates_values = rotation_of(spec, "value") is not None
        self._writes_encoder_tokens = isinstance(spec, CrossSpec)
        check_rotation("key", rotation_of(spec, "key"), "the dim of plane key", self._key_dim)
        check_rotation("value", rotation_of(spec, "value"), "the dim of plane value", self._value_dim)
        self.attends_to_trees = inner.attends_to_trees

    @property
    def value_dim(self) -> int:
        """The dim of a value, which the rotation does not change."""
        return self._value_dim

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan, as for a layer without rotations."""
        return self._inner.plan()

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: StepInputs, group: BatchGroup, stream: object
    ) -> None:
        """Scatter rotated keys and values to the slots of the step's tokens."""
        device = pool.plane("key", index).device
        keys, values = float_array(key, "key"), float_array(value, "value")
        check_rows(keys, "key", self._key_dim, device)
        check_rows(values, "value", self._value_dim, device)
        handle = call_stream(stream, key, device)
        stream = stream if handle is None else handle
        cross = batch.cross if self._writes_encoder_tokens else None
        max_tokens = batch.max_tokens if cross is None else cross.max_tokens
        with ExitStack() as lent:

            def rotated(array: Any, tensor: Tensor, name: str) -> Tensor:
                rows = lent.enter_context(batch._scratch.lent(tensor, name, max_tokens, array, handle))
                rotate_rows(array, name, rows, stream)
                return rows

            key = rotated(key, keys, "key") if self._rotates_keys else key
            value = rotated(value, values, "value") if self._rotates_values else value
            self._inner.write(pool, index, key, value, batch, group, stream)

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Return the attention of rotated queries, rotated back, in the framework of the query.

        The query determines where `paged_attention` allocates its workspace and results, so it keeps its framework.
        """
        out, device = options.get("out"), pool.plane("key", index).device
        self._check_dtypes(query, options)
        handle = call_stream(options.get("stream"), query, device)
        if handle is not None:
            options = {**options, "stream": handle}
            if self._rotates_values and out is not None:
                load_rotation(float_array(out, "out"), device, handle)
        with ExitStack() as lent:
            rows = query
            if self._rotates_keys:
                tensor = float_array(query, "query")
                check_rows(tensor, "query", self._key_dim, device)
                check_output_apart(out, tensor)
                if is_instance(query, "jax", "Array"):  # whose memory must not be written again
                    rows = rotate_rows(query, "query", None, options.get("stream"))
                else:
                    scratch = batch._scratch.lent(tensor, "query", batch.max_tokens, query, handle)
                    held = lent.enter_context(scratch)
                    rotate_rows(query, "query", held, options.get("stream"))
                    rows = in_framework(held, query)
            result = self._inner.attend(pool, index, rows, batch, group, options)
        if not self._rotates_values:
            return result
        output = result[0] if isinstance(result, tuple) else result
        target = None if is_instance(output, "jax", "Array") else output
        output = rotate_rows(output, "out", target, options.get("stream"))
        return (output, result[1]) if isinstance(result, tuple) else output

    def _check_dtypes(self, query: Any, options: dict[str, Any]) -> None:
        """Raise UnsupportedOption for float8 that a rotation would have to read or write."""
        if self._rotates_keys and is_float8(query):
            raise UnsupportedOption(
                f"query is {as_tensor(query).dtype}, but the layer has a key_rotation, which transforms queries of "
                "float32, float16 and bfloat16; pass the query in one of these dtypes, multiplied by query_scale"
            )
        if not self._rotates_values:
            return
        out = options.get("out")
        refused = "output_scale is given" if options.get("output_scale") is not None else None
        if refused is None and is_float8(out):
            refused = f"out is {as_tensor(out).dtype}"
        if refused is not None:
            raise UnsupportedOption(
                f"{refused}, but the layer has a value_rotation, which transforms the output in float32, float16 or "
                "bfloat16; leave output_scale out, pass out in one of these dtypes or none, and quantize the result"
            )


def check_rows(tensor: Tensor, name: str, dim: int, device: str) -> None:
    """Raise an error unless a tensor has rows ``[tokens, heads, dim]`` on the device of the cache."""
    if tensor.ndim != 3 or tensor.shape[2] != dim:
        raise ShapeError(f"{name} has shape {tensor.shape}; expected [tokens, heads, {dim}] for this layer")
    if tensor.device != device:
        raise DeviceError(
            f"{name} is on {tensor.device} and the cache on {device}; the arrays of a call must be on one device: pass "
            f"a copy of {name} on {device}"
        )


def check_output_apart(out: Any, query: Tensor) -> None:
    """Raise UnsupportedOption if `out` overlaps the query, of which the operator reads a copy, but is another array."""
    if out is None:
        return
    try:
        target = as_tensor(out)
    except PagecoreError:
        return  # which the operator refuses
    if any(getattr(target, name) != getattr(query, name) for name in ("pointer", "shape", "strides", "dtype")) and (
        shares_memory(target, query)
    ):
        raise UnsupportedOption("out shares memory with query but is another array; pass query itself, or a new array")


def is_float8(array: Any) -> bool:
    """Return True for an array of float8 codes; False for an object that the operator refuses."""
    try:
        return str(as_tensor(array).dtype).startswith("float8")
    except PagecoreError:
        return False


def call_stream(stream: object, example: Any, device: str) -> int | None:
    """Return the handle of the stream of a call; None on the host."""
    index = device_index(device)
    return None if index is None else stream_handle(stream, example, index)


def load_rotation(rows: Tensor, device: str, stream: int) -> None:
    """Load the kernel that rotates rows: a later error would leave the caller an output that is not rotated back."""
    index = device_index(device)
    assert index is not None
    kernels.kernel(KERNELS[str(rows.dtype)], index, stream)
