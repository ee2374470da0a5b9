"""AttentionSpec: the spec of an ordinary attention layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsFloat

from pagecore.arrays import DType, as_dtype
from pagecore.arrays.dtypes.formats import FOUR_OVER_SIX, SEALED_FORMATS, Format, as_format
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_factor, as_float, as_tuple, flag, require_int, shown
from pagecore.storage.specs.parallel import TensorParallel
from pagecore.storage.specs.rotation import check_rotation, refuse_summaries
from pagecore.storage.specs.sealing import Sealing, is_sealed_format, read_sealing
from pagecore.storage.specs.sparse_spec import Channels, checked_channels, summary_planes
from pagecore.storage.specs.spec import CACHE_DTYPES, SIDES, Plane, Side, Spec, format_of


@dataclass(frozen=True)
class AttentionSpec:
    """The stored planes and the attention options of one layer.

    Specs are values: compared by their fields, and hashable. A spec describes the whole layer, also for one rank of
    several; `TensorParallel.shard` returns the part of a rank.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        Number of key-value heads, and their dimension.
    v_head_dim : int, optional
        Dimension of values; `head_dim` by default.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of stored keys and values.
    window : int, optional
        Sliding window: number of keys that a query sees, including its own; by default all.
    num_query_heads : int, optional
        Number of query heads, a multiple of `num_kv_heads`; by default that of the query.
    scale : float, optional
        Factor of the scores q.k; ``head_dim ** -0.5`` by default.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    sinks : sequence of float, optional
        One additional logit per query head in the denominator of the softmax (GPT-OSS).
    format : str, optional
        Quantised format of the stored keys and values: "float8_e4m3fn", "float8_e5m2", "float8_token", "int8_token",
        "int4_token", "fp4_block16", "nvfp4", "nvfp4_4over6" or "mxfp8"; see `write_kv`. `dtype` remains the dtype of
        the model's keys and values. By default they are stored in `dtype`. "kivi2" and "kivi4" seal whole blocks, once
        newer tokens follow: see `residual`.
    value_format : str, optional
        Format of the values, if it is another than that of the keys; keys without a format are stored in `dtype`.
        Values without a format next to keys with one cannot be expressed, nor can one sealed format next to none or to
        another kind, nor "nvfp4" next to "nvfp4_4over6". If it equals `format`, it becomes None:
        ``dataclasses.replace(spec, format=...)`` then changes both.
    key_scale, value_scale : float or sequence of float, optional
        Given factor of the stored numbers, for the layer or for each key-value head: of the formats "float8_e4m3fn" and
        "float8_e5m2", and the global scale of "nvfp4", a float. The other formats compute their scales.
    key_bounds : bool
        Also store the element-wise bounds of the keys of each block, planes "key_min" and "key_max", for
        `score_blocks` (Quest). Every write keeps them up.
    label_channels : sequence of sequences of int, optional
        For each key-value head the channels of its keys that are also stored as plane "label", for `score_tokens`
        (double sparsity).
    lookahead : int
        Keys before the window or chunk that are kept in addition, at most a window or chunk, so that a sequence can be
        truncated by up to `lookahead` tokens after they are computed (multi-token prediction). Without a window or
        chunk all keys are kept.
    chunk : int, optional
        Chunked local attention (Llama 4): the query at position p sees key j only if ``j // chunk == p // chunk``.
        Exclusive with `window`.
    sink_tokens : int
        First tokens of a sequence that every query sees in addition to its window, and that the cache therefore keeps
        (StreamingLLM). Not to be confused with `sinks`, logits without keys.
    residual : int, optional
        For "kivi2" and "kivi4", as the next two: a commit seals the whole blocks that `residual` newer tokens follow;
        128 by default. Newer blocks stay in `dtype`, in a group of their own; see `tail`. Layers of one cache seal
        together, after the largest of their residuals.
    group_size : int, optional
        Tokens of a channel of keys, and channels of a token's values, that share a scale and a least number in `dtype`;
        32 by default. A multiple of 16 that divides `block_size` and `v_head_dim`.
    block_size : int, optional
        The block size of the cache, because the planes are per block; by default 32, or `group_size` if that is larger.
    key_rotation, value_rotation : {"hadamard"}, optional
        Store keys or values after an orthogonal transform of each head, which spreads outlier channels so that formats
        of few bits lose less; see `hadamard`, and docs/formats.md for measured errors. `PagedKVCache.write` transforms
        them, and `attend` the queries likewise, so that scores stay the same, and the output of rotated values back.
        The planes hold transformed numbers. Not with `key_bounds` or `label_channels`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        Invalid sizes, numbers, dtype, format or rotation, or a head dim that the groups of the format or the blocks of
        the rotation do not divide.

    Examples
    --------
    >>> from pagecore import AttentionSpec
    >>> spec = AttentionSpec(num_kv_heads=8, head_dim=128, num_query_heads=32)
    >>> [(plane.name, plane.shape, str(plane.dtype)) for plane in spec.planes]
    [('key', (8, 128), 'bfloat16'), ('value', (8, 128), 'bfloat16')]
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: DType | str = "bfloat16"
    window: int | None = None
    num_query_heads: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    sinks: Iterable[SupportsFloat] | None = None
    format: str | None = None
    key_scale: SupportsFloat | Iterable[SupportsFloat] = 1.0
    value_scale: SupportsFloat | Iterable[SupportsFloat] = 1.0
    key_bounds: bool = False
    label_channels: Iterable[Iterable[int]] | None = None
    lookahead: int = 0
    chunk: int | None = None
    sink_tokens: int = 0
    value_format: str | None = None
    residual: int | None = None
    group_size: int | None = None
    block_size: int | None = None
    key_rotation: str | None = None
    value_rotation: str | None = None

    def __post_init__(self) -> None:
        self._check_dims()
        self._check_reach()
        self._check_scores()
        self._check_formats()
        for side in SIDES:
            self._put(f"{side}_scale", self._checked_factor(side))
        self._put("key_bounds", flag("key_bounds", self.key_bounds))
        if self.label_channels is not None:
            self._put("label_channels", checked_channels(self.label_channels, self.num_kv_heads, self.head_dim))
        check_rotation("key", self.key_rotation, "head_dim", self.head_dim)
        check_rotation("value", self.value_rotation, "v_head_dim", self.v_head_dim or 0)
        refuse_summaries(self)

    def _put(self, name: str, value: object) -> None:
        """Set a field of the frozen spec, while it is made."""
        object.__setattr__(self, name, value)

    def _check_dims(self) -> None:
        """Convert and check heads, dims and dtype."""
        self._put("num_kv_heads", require_int("num_kv_heads", self.num_kv_heads))
        self._put("head_dim", require_int("head_dim", self.head_dim))
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        self._put("v_head_dim", require_int("v_head_dim", v_head_dim))
        self._put("dtype", as_dtype(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(f"dtype is {self.dtype}; a cache stores {', '.join(CACHE_DTYPES)}")

    def _check_reach(self) -> None:
        """Convert and check what limits the keys that a query sees."""
        if self.window is not None:
            self._put("window", require_int("window", self.window, max=None))
        if self.chunk is not None:
            self._put("chunk", require_int("chunk", self.chunk))
            if self.window is not None:
                raise UnsupportedOption(f"window is {self.window} and chunk is {self.chunk}; use one of them")
        self._put("sink_tokens", require_int("sink_tokens", self.sink_tokens, min=0))
        if self.sink_tokens and self.window is None:
            raise UnsupportedOption(
                f"sink_tokens is {self.sink_tokens} and there is no window; sink tokens belong to a window: "
                "set window, or leave sink_tokens out"
            )
        self._put("lookahead", require_int("lookahead", self.lookahead, min=0))
        name, reach = ("window", self.window) if self.chunk is None else ("chunk", self.chunk)
        if reach is not None and self.lookahead > reach:
            raise ShapeError(
                f"lookahead is {self.lookahead}, but the {name} has {reach} tokens; use a lookahead of at most the "
                f"{name}"
            )

    def _check_scores(self) -> None:
        """Convert and check query heads, and what changes their scores."""
        if self.num_query_heads is not None:
            self._put("num_query_heads", require_int("num_query_heads", self.num_query_heads))
            if self.num_query_heads % self.num_kv_heads:
                raise ShapeError(
                    f"num_query_heads is {self.num_query_heads}; it must be a multiple of num_kv_heads, "
                    f"{self.num_kv_heads}"
                )
        if self.scale is not None:
            self._put("scale", as_float("scale", self.scale))
            if not math.isfinite(self.scale):
                raise ShapeError(f"scale is {self.scale}; give a finite number, or None for head_dim ** -0.5")
        self._put("softcap", as_float("softcap", self.softcap))
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ShapeError(f"softcap is {self.softcap}; give a finite number of at least 0; 0 disables it")
        if self.sinks is not None:
            listed = as_tuple("sinks", self.sinks, "one number for each query head")
            self._put("sinks", tuple(as_float("a sink", sink) for sink in listed))
            self._check_sinks()

    def _check_formats(self) -> None:
        """Convert and check the formats, and whether their groups divide the dims."""
        for name in ("format", "value_format"):
            given = getattr(self, name)
            if given is not None and not is_sealed_format(given):
                as_format(given, name, SEALED_FORMATS)
                self._put(name, str(given))
        if self.value_format == self.format:
            self._put("value_format", None)
        if {self.format, self.value_format} == {"nvfp4", FOUR_OVER_SIX}:
            raise UnsupportedOption(
                f"format is {self.format!r} and value_format {self.value_format!r}; a write computes all scales of "
                "nvfp4 in one way: use one of these names for both"
            )
        sealing = read_sealing(self)
        self._put("_sealing", sealing)
        if sealing is not None:
            return
        for dim, stored in zip(("head_dim", "v_head_dim"), self._formats, strict=True):
            if stored is not None:
                stored.check_dim(dim, getattr(self, dim))

    @property
    def sealing(self) -> Sealing | None:
        """Bits, groups and residual of the formats "kivi2" and "kivi4"; None for others."""
        found: Sealing | None = self._sealing  # type: ignore[attr-defined]  # set by `_check_formats`
        return found

    @cached_property
    def tail(self) -> AttentionSpec | None:
        """The planes of the newest tokens next to sealed blocks, "key" and "value" in `dtype`; None without a sealing.

        Its window is ``residual + 1``: what a sequence keeps, while queries see the sealed tokens as well, those within
        the window or chunk of the layer.
        """
        sealing = self.sealing
        if sealing is None:
            return None
        plain = replace(self.with_format(None), lookahead=0, sink_tokens=0, chunk=None, window=None)
        return replace(plain, window=sealing.residual + 1)

    @property
    def _formats(self) -> tuple[Format | None, Format | None]:
        """Formats of keys and of values."""
        return format_of(self, "key"), format_of(self, "value")

    def _checked_factor(self, side: Side) -> float | tuple[float, ...]:
        """Return the given factor of keys or values as a float, or as a tuple with one for each head if they differ."""
        name = f"{side}_scale"
        given = getattr(self, name)
        if isinstance(given, str | bytes) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
            factor: float | tuple[float, ...] = as_factor(name, given)
        else:
            factor = tuple(as_factor(f"an entry of {name}", each) for each in given)
            if len(factor) not in (1, self.num_kv_heads):
                raise ShapeError(
                    f"{name} has {len(factor)} entries; expected a number, or one per key-value head: "
                    f"{self.num_kv_heads}"
                )
            if len(set(factor)) == 1:
                factor = factor[0]
        if self.sealing is not None:
            if factor != 1.0:
                raise UnsupportedOption(
                    f"{name} is {shown(given)}, but format {self.format!r}, which computes its scales, takes none; "
                    "leave it out"
                )
            return factor
        stored = format_of(self, side)
        if factor != 1.0 and stored is None:
            raise UnsupportedOption(f"{name} is {shown(given)}, but {side}s without a format take none; leave it out")
        if factor != 1.0 and stored is not None and not stored.takes_factor:
            raise UnsupportedOption(
                f"{name} is {shown(given)}, but format {stored.name!r}, which computes its scales, takes none; leave "
                "it out"
            )
        if stored is not None and stored.name == "nvfp4" and isinstance(factor, tuple):
            raise UnsupportedOption(
                f"{name} has {len(factor)} entries; the global scale of 'nvfp4' is one float for the layer"
            )
        return factor

    def _check_sinks(self) -> None:
        if any(math.isnan(float(sink)) for sink in self.sinks or ()):
            raise ShapeError("a sink is nan; give numbers, and -inf for a head without a sink")
        count = len(tuple(self.sinks or ()))
        heads = self.num_query_heads
        if count == 0 or count % self.num_kv_heads or (heads is not None and count != heads):
            expected = heads if heads is not None else f"a multiple of num_kv_heads {self.num_kv_heads}"
            raise ShapeError(f"sinks has {count} entries; expected one per query head, {expected}")

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Key ``(num_kv_heads, head_dim)`` and value ``(num_kv_heads, v_head_dim)``.

        With a format, the last extent counts stored codes. Planes "key_scale" and "value_scale" ``(num_kv_heads,
        groups)`` follow, each if its format computes scales. Planes "key_min" and "key_max" ``(num_kv_heads,
        head_dim)`` per block, and "label" ``(num_kv_heads, channels)`` come last; they are stored in `dtype`. The
        formats "kivi2" and "kivi4" have "sealed_key", "sealed_value", "sealed_key_scale" and "sealed_value_scale" per
        block instead, and the planes of `tail`.
        """
        if self.sealing is not None:
            assert self.v_head_dim is not None
            return self.sealing.planes(self.num_kv_heads, self.head_dim, self.v_head_dim, as_dtype(self.dtype))
        return self._stored_planes + summary_planes(
            self.num_kv_heads, self.head_dim, as_dtype(self.dtype), self.key_bounds, self._channels
        )

    @property
    def _channels(self) -> Channels | None:
        return None if self.label_channels is None else tuple(tuple(channels) for channels in self.label_channels)

    @property
    def _stored_planes(self) -> tuple[Plane, ...]:
        assert self.v_head_dim is not None
        heads = self.num_kv_heads
        codes, scales = [], []
        for name, dim, stored in zip(SIDES, (self.head_dim, self.v_head_dim), self._formats, strict=True):
            if stored is None:
                codes.append(Plane(name, (heads, dim), as_dtype(self.dtype)))
                continue
            codes.append(Plane(name, (heads, stored.row_codes(dim)), stored.dtype))
            if stored.scale_dtype is not None:
                scales.append(Plane(f"{name}_scale", (heads, stored.row_scales(dim)), stored.scale_dtype))
        return (*codes, *scales)

    def shard(self, parallel: TensorParallel) -> AttentionSpec:
        """Return one rank's part of the layer: its key-value heads, and their query heads and sinks."""
        heads = parallel.heads(self.num_kv_heads)
        sinks = None if self.sinks is None else tuple(self.sinks)
        num_query_heads = self.num_query_heads if sinks is None else len(sinks)
        part = replace(
            self,
            num_kv_heads=len(heads),
            num_query_heads=None,
            sinks=None,
            key_scale=_part(self.key_scale, heads),
            value_scale=_part(self.value_scale, heads),
            label_channels=_part(self.label_channels, heads),
        )
        if num_query_heads is None:
            return part
        queries = parallel.query_heads(num_query_heads)
        return replace(
            part,
            num_query_heads=None if self.num_query_heads is None else len(queries),
            sinks=None if sinks is None else sinks[queries.start : queries.stop],
        )

    def with_dtype(self, dtype: DType | str) -> AttentionSpec:
        """Return the same layer with keys and values of another dtype; formats stay."""
        return replace(self, dtype=dtype)

    def with_format(self, format: str | None) -> AttentionSpec:
        """Return the same layer, keys and values stored in a format with factors of 1; None for no format.

        Rotations stay.
        """
        return replace(
            self,
            format=format,
            value_format=None,
            key_scale=1.0,
            value_scale=1.0,
            residual=None,
            group_size=None,
            block_size=None,
        )


def _part(given: Any, heads: range) -> Any:
    """Return the entries of some heads, if there is one for each."""
    return given[heads.start : heads.stop] if isinstance(given, tuple) else given


def sealing_of(spec: Spec) -> Sealing | None:
    """Return how the blocks of a layer are sealed; None for a spec without sealed blocks."""
    return spec.sealing if isinstance(spec, AttentionSpec) else None


def tail_of(spec: Spec) -> AttentionSpec:
    """Return the spec of the newest tokens of a layer with sealed blocks."""
    assert isinstance(spec, AttentionSpec)
    assert spec.tail is not None
    return spec.tail
