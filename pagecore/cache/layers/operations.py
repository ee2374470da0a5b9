"""Operations of a layer: how its attention is planned, and how its tokens are written and attended to.

`pagecore.cache.layers.dispatch` chooses the `LayerOps` of a layer. The cache, its store and its steps ask them, and do
not assume which planes the layer stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import numpy as np

from pagecore.arrays import Tensor
from pagecore.arrays.dtypes.formats import FOUR_OVER_SIX
from pagecore.arrays.tensors.uploads import to_device
from pagecore.cache.layers.inputs import BatchGroup, StepInputs
from pagecore.cache.layers.selection import num_listed, padded_selection
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, latent_attention, paged_attention, write_kv, write_latent
from pagecore.ops.arguments._arguments import float_array
from pagecore.storage import AttentionSpec, CrossSpec, KVPool, LatentSpec, Spec
from pagecore.storage.specs.attended import attended_keys
from pagecore.storage.specs.spec import SIDES, Side, format_of

# Options that limit the keys of a query; one of them replaces all of a spec.
LIMITS = ("window", "chunk", "sink_tokens")


class LayerOps(ABC):
    """Operations of one spec on one device.

    Attributes
    ----------
    attends_to_trees : bool
        True if `attend` serves steps with trees of drafts.
    """

    attends_to_trees = False

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Numbers of one attention output a head, which size the workspace of a plan on a device."""

    @abstractmethod
    def plan(self) -> AttentionPlan | None:
        """Return an empty plan for the layers of a group; None if their attention cannot be planned ahead."""

    @abstractmethod
    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: StepInputs, group: BatchGroup, stream: object
    ) -> None:
        """Write the tokens of a step to layer `index` of a pool; see `PagedKVCache.write`."""

    @abstractmethod
    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Return the attention of a step's queries to layer `index` of a pool; see `PagedKVCache.attend`."""


class AttentionOps(LayerOps):
    """Operations of a spec that stores the planes key and value, ``(heads, dim)`` per token.

    `AttentionSpec` supplies scale, softcap, sinks and the number of query heads; any other spec its window, and a
    format with its factors if it has these attributes. The planes "key_scale" and "value_scale" hold the scales of the
    formats of keys and values.
    """

    def __init__(self, spec: Spec, device: str) -> None:
        self._spec = spec
        self._device = device
        keys = attended_keys(spec)
        self.attends_to_trees = not keys.sink_tokens
        self._defaults: dict[str, Any] = {"window": keys.window} if keys.chunk is None else {"chunk": keys.chunk}
        if keys.sink_tokens:
            self._defaults["sink_tokens"] = keys.sink_tokens
        self._summaries: tuple[str, ...] = ()
        self._write_options: dict[str, Any] = {}
        if isinstance(spec, AttentionSpec):
            self._keep_summaries(spec)
            sinks = None if spec.sinks is None else to_device(np.array(list(spec.sinks), np.float32), device)
            self._defaults.update(scale=spec.scale, softcap=spec.softcap, sinks=sinks)
        stored = {side: format_of(spec, side) for side in SIDES}
        self._scale_planes = [f"{side}_scale" for side, each in stored.items() if each and each.scale_dtype is not None]
        self._formats = stored
        self._factors = given_factors(spec, device)
        self._write_options |= write_format(spec)

    def _keep_summaries(self, spec: AttentionSpec) -> None:
        """Note the summaries of keys that each write keeps up."""
        if spec.key_bounds:
            self._summaries += ("key_min", "key_max")
        if spec.label_channels is not None:
            self._summaries += ("label",)
            self._write_options["label_channels"] = to_device(np.array(spec.label_channels, np.int32), self._device)

    @property
    def key_dim(self) -> int:
        """Numbers of a row of the plane key, of which a byte can hold two."""
        return self._dim("key")

    @property
    def value_dim(self) -> int:
        """Numbers of a row of the plane value, of which a byte can hold two."""
        return self._dim("value")

    def _dim(self, side: Side) -> int:
        stored = next(plane.shape[-1] for plane in self._spec.planes if plane.name == side)
        format = self._formats[side]
        return stored if format is None else stored * format.codes_per_byte

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan; None if the spec does not specify its number of query heads."""
        spec = self._spec
        if not isinstance(spec, AttentionSpec) or spec.num_query_heads is None:
            return None
        return AttentionPlan(
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            window=spec.window,
            chunk=spec.chunk,
            sink_tokens=spec.sink_tokens,
            device=self._device,
        )

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: StepInputs, group: BatchGroup, stream: object
    ) -> None:
        """Scatter keys and values to the slots of the step's tokens."""
        keys, values = pool.plane("key", index), pool.plane("value", index)
        tensor, slots = float_array(key, "key"), group.slot_mapping
        self._check_rows(tensor, batch)
        rows = tensor.shape[0] if tensor.ndim else 0
        # On a device `write_kv` gets the caller's own array, whose framework determines the default stream.
        given = tensor if keys.device == "cpu" else key
        if rows < slots.shape[0]:
            slots = slots[:rows]
        planes = {name: pool.plane(name, index) for name in self._summaries}
        options = self._write_options | self._scales(pool, index) | planes
        write_kv(given, value, keys, values, slots, stream=stream, **options)

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Call `paged_attention`; `options` override the defaults of the spec."""
        defaults = self._defaults
        if options.keys().isdisjoint(("plan", "causal", *LIMITS)):
            defaults = {**defaults, "plan": group.plan}
        elif not options.keys().isdisjoint(LIMITS):
            defaults = {name: value for name, value in defaults.items() if name not in LIMITS}
        (rows, seq_lens), cu_query_lens = self._attended(batch), batch.cu_query_lens
        if batch.tree_mask is not None and defaults.get("causal", True) and "tree_mask" not in options:
            options = {"tree_mask": batch.tree_mask[: first_extent(query)], **options}
        options = padded_selection(options, batch.num_sequences, seq_lens.shape[0])
        listed = num_listed(options, batch.num_sequences, seq_lens.shape[0])
        if listed < seq_lens.shape[0]:
            seq_lens, rows, cu_query_lens = seq_lens[:listed], rows[:listed], cu_query_lens[: listed + 1]
        return paged_attention(
            query,
            pool.plane("key", index),
            pool.plane("value", index),
            group.block_table,
            seq_lens,
            rows=rows,
            cu_query_lens=cu_query_lens,
            **{**defaults, **self._scales(pool, index), **options},
        )

    def _check_rows(self, key: Tensor, batch: StepInputs) -> None:
        if key.ndim == 3 and key.shape[0] < batch.num_tokens:
            advice = ": pass key.transpose(1, 0, 2), its heads come first" if key.shape[1] == batch.num_tokens else ""
            raise ShapeError(f"key has {key.shape[0]} tokens; the step has {batch.num_tokens}{advice}")

    def _attended(self, batch: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the rows of the block table that the queries attend to, and their lengths."""
        return batch.rows, batch.seq_lens

    def _scales(self, pool: KVPool, index: int) -> dict[str, Any]:
        """Return the arguments of `write_kv` and `paged_attention` that hold scales; none without a format."""
        if not self._scale_planes:
            return self._factors
        return {name: pool.plane(name, index) for name in self._scale_planes} | self._factors


def first_extent(array: Any) -> int | None:
    """Return the length of an array's first axis; None if it has none, which the operator refuses."""
    shape = getattr(array, "shape", None)
    return int(shape[0]) if shape else None


def given_factors(spec: Spec, device: str) -> dict[str, Any]:
    """Return the given factors of a spec's formats as arguments of `write_kv`; an array is on the device."""
    given = {}
    for side in SIDES:
        stored = format_of(spec, side)
        if stored is not None and stored.takes_factor:
            suffix = "scale" if stored.scale_dtype is None else "global_scale"
            given[f"{side}_{suffix}"] = getattr(spec, f"{side}_scale", 1.0)
    return {
        name: to_device(np.array(factor, np.float32), device) if isinstance(factor, tuple) else factor
        for name, factor in given.items()
    }


def write_format(spec: Spec) -> dict[str, Any]:
    """Return the format of a spec as an option of `write_kv`, if it decides how scales are computed."""
    is_named = FOUR_OVER_SIX in (getattr(spec, "format", None), getattr(spec, "value_format", None))
    return {"format": FOUR_OVER_SIX} if is_named else {}


class CrossOps(AttentionOps):
    """Operations of a `CrossSpec`: a step writes encoder tokens, and every query attends to all of its sequence's."""

    def __init__(self, spec: CrossSpec, device: str) -> None:
        super().__init__(spec, device)
        self._defaults["causal"] = False

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan without causality; None if the spec does not specify its number of query heads."""
        spec = self._spec
        assert isinstance(spec, CrossSpec)
        if spec.num_query_heads is None:
            return None
        return AttentionPlan(
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            causal=False,
            device=self._device,
        )

    def _check_rows(self, key: Tensor, batch: StepInputs) -> None:
        assert batch.cross is not None
        if key.ndim == 3 and key.shape[0] < batch.cross.num_tokens:
            raise ShapeError(
                f"key has {key.shape[0]} encoder tokens; the step writes {batch.cross.num_tokens}: pass those of "
                "batch.cross.new_lens, sequence after sequence"
            )

    def _attended(self, batch: StepInputs) -> tuple[Tensor, Tensor]:
        assert batch.cross is not None
        return batch.cross.rows, batch.cross.seq_lens


class LatentOps(LayerOps):
    """Operations of a `LatentSpec`: a step writes latents and rope parts, and absorbed queries attend to them."""

    def __init__(self, spec: LatentSpec, device: str) -> None:
        self._spec = spec
        self._device = device
        self._has_rope_plane = any(plane.name == "rope" for plane in spec.planes)

    @property
    def value_dim(self) -> int:
        """Dimension of the latent, which is the value of every head."""
        return self._spec.latent_dim

    def plan(self) -> AttentionPlan | None:
        """Return an empty plan; None if the spec does not specify its number of query heads."""
        spec = self._spec
        if spec.num_query_heads is None:
            return None
        return AttentionPlan(
            num_query_heads=spec.num_query_heads, num_kv_heads=1, window=spec.window, device=self._device
        )

    def write(
        self, pool: KVPool, index: int, key: Any, value: Any, batch: StepInputs, group: BatchGroup, stream: object
    ) -> None:
        """Scatter latents ``[T, latent_dim]`` and rope parts ``[T, rope_dim]`` to the slots of the step's tokens."""
        latents, slots = pool.plane("latent", index), group.slot_mapping
        tensor = float_array(key, "latent")
        rows = tensor.shape[0] if tensor.ndim else 0
        if tensor.ndim == 2 and rows < batch.num_tokens:
            raise ShapeError(f"latent has {rows} tokens; the step has {batch.num_tokens}")
        write_latent(
            tensor if latents.device == "cpu" else key,
            value,
            latents,
            self._rope(pool, index),
            slots if rows >= slots.shape[0] else slots[:rows],
            format=self._spec.format,
            scale=self._spec.key_scale,
            stream=stream,
        )

    def attend(
        self, pool: KVPool, index: int, query: Any, batch: StepInputs, group: BatchGroup, options: dict[str, Any]
    ) -> Any:
        """Call `latent_attention` with the two parts of a query; `options` override the defaults of the spec."""
        query_latent, query_rope = self._parts(query)
        spec = self._spec
        given = {"scale": spec.scale, "format": spec.format, "latent_scale": spec.key_scale, **options}
        cache = pool.plane("latent", index), self._rope(pool, index)
        if options.get("indices") is not None:
            return latent_attention(query_latent, query_rope, *cache, **given)
        if options.keys().isdisjoint(("plan", "causal", "window")):
            given["plan"] = group.plan
        return latent_attention(
            query_latent,
            query_rope,
            *cache,
            group.block_table,
            batch.seq_lens,
            rows=batch.rows,
            cu_query_lens=batch.cu_query_lens,
            **{"window": spec.window, **given},
        )

    def _parts(self, query: Any) -> tuple[Any, Any]:
        if not (isinstance(query, tuple | list) and len(query) == 2):
            raise UnsupportedOption(
                f"query is a {type(query).__name__}, but layers of a LatentSpec attend with two arrays; pass "
                "(query_latent, query_rope): the query times the key projection of its head, [T, heads, latent_dim], "
                "and its rotated part, [T, heads, rope_dim]"
            )
        return query[0], query[1]

    def _rope(self, pool: KVPool, index: int) -> Tensor | None:
        return pool.plane("rope", index) if self._has_rope_plane else None


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
