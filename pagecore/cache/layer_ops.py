"""Operations of a layer: how its attention is planned, and how its tokens are written and attended to.

`layer_ops` is the only place that decides by the spec of a layer. The cache, its store and its steps ask the `LayerOps`
of a layer, and do not assume which planes the layer stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import numpy as np

from pagecore.arrays.uploads import to_device
from pagecore.cache.step.batch import Batch, BatchGroup
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, latent_attention, paged_attention, write_kv, write_latent
from pagecore.ops._checks import float_array
from pagecore.storage import AttentionSpec, KVPool, LatentSpec, Spec
from pagecore.storage.spec import stores_key_and_value, window_of


class LayerOps(ABC):
    """Operations of one spec on one device."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Numbers of one attention output a head, which size the workspace of a plan on a device."""

    @abstractmethod
    def plan(self) -> AttentionPlan | None:
        """Return an empty plan for the layers of a group; None if their attention cannot be planned ahead."""

    @abstractmethod
    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: Batch, group: BatchGroup, stream: object
    ) -> None:
        """Write the tokens of a step to layer `index` of a pool; see `PagedKVCache.write`."""

    @abstractmethod
    def attend(
        self, pool: KVPool, index: int, query: Any, batch: Batch, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Return the attention of a step's queries to layer `index` of a pool; see `PagedKVCache.attend`."""


class AttentionOps(LayerOps):
    """Operations of a spec that stores the planes key and value, ``(heads, dim)`` per token.

    `AttentionSpec` supplies scale, softcap, sinks and the number of query heads; any other spec only its window.
    """

    def __init__(self, spec: Spec, device: str) -> None:
        self._spec = spec
        self._device = device
        self._defaults: dict[str, Any] = {"window": window_of(spec)}
        if isinstance(spec, AttentionSpec):
            sinks = None if spec.sinks is None else to_device(np.array(list(spec.sinks), np.float32), device)
            self._defaults.update(scale=spec.scale, softcap=spec.softcap, sinks=sinks)

    @property
    def value_dim(self) -> int:
        """Last extent of the plane value."""
        return next(plane.shape[-1] for plane in self._spec.planes if plane.name == "value")

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan; None if the spec does not specify its number of query heads."""
        spec = self._spec
        if not isinstance(spec, AttentionSpec) or spec.num_query_heads is None:
            return None
        return AttentionPlan(
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            window=spec.window,
            device="cpu" if self._device == "none" else self._device,
        )

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: Batch, group: BatchGroup, stream: object
    ) -> None:
        """Scatter keys and values to the slots of the step's tokens."""
        keys, values = pool.plane("key", index), pool.plane("value", index)
        tensor, slots = float_array(key, "key"), group.slot_mapping
        if tensor.ndim == 3 and tensor.shape[0] < batch.num_tokens:
            raise ShapeError(f"key has {tensor.shape[0]} tokens; the step has {batch.num_tokens}")
        rows = tensor.shape[0] if tensor.ndim else 0
        # On a device `write_kv` gets the caller's own array, whose framework determines the default stream.
        given = tensor if keys.device == "cpu" else key
        write_kv(given, value, keys, values, slots if rows >= slots.shape[0] else slots[:rows], stream=stream)

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: Batch, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Call `paged_attention`; `options` override the defaults of the spec."""
        defaults = self._defaults
        if options.keys().isdisjoint(("plan", "causal", "window")):
            defaults = {**defaults, "plan": group.plan}
        return paged_attention(
            query,
            pool.plane("key", index),
            pool.plane("value", index),
            group.block_table,
            batch.seq_lens,
            rows=batch.rows,
            cu_query_lens=batch.cu_query_lens,
            **{**defaults, **options},
        )


class LatentOps(LayerOps):
    """Operations of a `LatentSpec`: key and value of a write are latent and rope, and queries are absorbed."""

    def __init__(self, spec: LatentSpec, device: str) -> None:
        self._spec = spec
        self._device = device
        self._names = [plane.name for plane in spec.planes if plane.name in ("latent", "rope")]

    @property
    def value_dim(self) -> int:
        """Numbers of a latent."""
        return self._spec.latent_dim

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan; None on a device, and if the spec does not specify its number of query heads."""
        spec = self._spec
        if spec.num_query_heads is None or self._device not in ("cpu", "none"):
            return None
        return AttentionPlan(num_query_heads=spec.num_query_heads, num_kv_heads=1, window=spec.window, device="cpu")

    def _planes(self, pool: KVPool, index: int) -> tuple[Any, Any]:
        """Return the planes of latent and rope; None for rope if the latent's plane holds both."""
        planes = [pool.plane(name, index) for name in self._names]
        return planes[0], planes[1] if len(planes) > 1 else None

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: Batch, group: BatchGroup, stream: object
    ) -> None:
        """Scatter latents ``[T, latent_dim]``, the key, and rope numbers ``[T, rope_dim]``, the value."""
        latent, rope = self._planes(pool, index)
        tensor, slots = float_array(key, "latent"), group.slot_mapping
        if tensor.ndim == 2 and tensor.shape[0] < batch.num_tokens:
            raise ShapeError(f"latent has {tensor.shape[0]} tokens; the step has {batch.num_tokens}")
        rows = tensor.shape[0] if tensor.ndim else 0
        scale = None if self._spec.format != "float8_e4m3fn" else float(self._spec.latent_scale)
        used = slots if rows >= slots.shape[0] else slots[:rows]
        write_latent(tensor if latent.device == "cpu" else key, value, latent, rope, used, scale=scale, stream=stream)

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: Batch, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Call `latent_attention` on a query ``(query_latent, query_rope)``; with `indices`, on these slots alone."""
        if not (isinstance(query, tuple | list) and len(query) == 2):
            raise UnsupportedOption(
                f"query is a {type(query).__name__}; a layer with a LatentSpec takes (query_latent, query_rope)"
            )
        spec = self._spec
        defaults: dict[str, Any] = {"scale": spec.scale}
        if spec.format == "float8_e4m3fn":
            defaults["latent_scale"] = spec.latent_scale
        latent, rope = self._planes(pool, index)
        if options.get("indices") is not None:
            return latent_attention(query[0], query[1], latent, rope, **{**defaults, **options})
        defaults["window"] = spec.window
        if options.keys().isdisjoint(("plan", "causal", "window")):
            defaults["plan"] = group.plan
        return latent_attention(
            query[0],
            query[1],
            latent,
            rope,
            group.block_table,
            batch.seq_lens,
            rows=batch.rows,
            cu_query_lens=batch.cu_query_lens,
            **{**defaults, **options},
        )


class StoredOps(LayerOps):
    """Operations of a spec with other planes.

    The cache stores, copies and swaps the planes; kernels of the caller write and read them.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    @property
    def value_dim(self) -> int:
        """0: such a layer does not attend."""
        return 0

    def plan(self) -> AttentionPlan | None:
        """Return None: there is no attention to plan."""
        return None

    def write(self, *_: Any) -> NoReturn:
        """Raise UnsupportedOption."""
        raise self._refusal("write", "with batch.group(layer).slot_mapping")

    def attend(self, *_: Any) -> NoReturn:
        """Raise UnsupportedOption."""
        raise self._refusal("attend", "with batch.group(layer).block_table")

    def _refusal(self, verb: str, way: str) -> UnsupportedOption:
        names = [plane.name for plane in self._spec.planes]
        return UnsupportedOption(
            f"{verb} serves the planes key and value, but a {type(self._spec).__name__} stores {', '.join(names)}; use "
            f"a kernel of your own on cache.plane({names[0]!r}, layer) {way}"
        )


def layer_ops(spec: Spec, device: str) -> LayerOps:
    """Return the operations of a spec on a device of `PagedKVCache`, "none" included."""
    if isinstance(spec, LatentSpec):
        return LatentOps(spec, device)
    return AttentionOps(spec, device) if stores_key_and_value(spec) else StoredOps(spec)
