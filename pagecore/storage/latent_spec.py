"""LatentSpec: the spec of a layer with latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import SupportsFloat

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_float, flag, require_int, shown
from pagecore.storage.parallel import TensorParallel
from pagecore.storage.spec import CACHE_DTYPES, Plane

__all__ = ["LATENT_FORMATS", "PACKED_ROW_BYTES", "LatentSpec"]

# Bytes of the rows of packed formats, which hold 512 latent and 64 rope numbers with their scales.
PACKED_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
PACKED_DIMS = (512, 64)
LATENT_FORMATS = ("float8_e4m3fn", *PACKED_ROW_BYTES)


@dataclass(frozen=True)
class LatentSpec:
    """The stored planes and the attention options of one layer with multi-head latent attention (MLA).

    A token stores one latent, which all heads share, and its rope numbers. Keys and values of the heads are projections
    of the latent; `latent_attention` reads the latent itself, with absorbed queries.

    Parameters
    ----------
    latent_dim, rope_dim : int
        Numbers of the latent (`kv_lora_rank`) and of the rotated part of the key (`qk_rope_head_dim`).
    num_query_heads : int, optional
        Number of query heads; by default that of the query.
    scale : float
        Factor of the scores: ``qk_head_dim ** -0.5`` before absorption, times mscale squared with YaRN. It has no
        default, because it does not follow from `latent_dim` and `rope_dim`.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of the model's latents, in which they are stored unless there is a format.
    format : {"float8_e4m3fn", "fp8_ds_mla", "nvfp4_ds_mla"}, optional
        Format of the stored rows; see `write_latent`. The last two are bytes of whole rows, for 512 latent and 64 rope
        numbers.
    latent_scale : float
        Factor of the codes of "float8_e4m3fn".
    index_dim : int, optional
        Numbers of an index key (128 for DeepSeek-V3.2), which adds the planes of the indexer.
    window : int, optional
        Sliding window: number of keys that a query sees, including its own; by default all.
    joint : bool
        Store latent and rope numbers in one plane. False stores a plane for each; the last two formats are always
        joint.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        Invalid sizes, numbers, dtype or format.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024.

    Examples
    --------
    >>> from pagecore import LatentSpec
    >>> spec = LatentSpec(num_query_heads=128, scale=192**-0.5)
    >>> [(plane.name, plane.shape, plane.nbytes) for plane in spec.planes]
    [('latent', (576,), 1152)]
    """

    latent_dim: int = 512
    rope_dim: int = 64
    num_query_heads: int | None = None
    scale: SupportsFloat | None = None
    dtype: DType | str = "bfloat16"
    format: str | None = None
    latent_scale: SupportsFloat = 1.0
    index_dim: int | None = None
    window: int | None = None
    joint: bool = True

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("latent_dim", require_int("latent_dim", self.latent_dim))
        put("rope_dim", require_int("rope_dim", self.rope_dim))
        for name in ("num_query_heads", "index_dim"):
            if getattr(self, name) is not None:
                put(name, require_int(name, getattr(self, name)))
        if self.window is not None:
            put("window", require_int("window", self.window, max=None))
        if self.scale is None:
            raise UnsupportedOption(
                "scale is missing; give qk_head_dim ** -0.5 of the model, times mscale squared with YaRN: it does not "
                "follow from latent_dim and rope_dim"
            )
        put("scale", as_float("scale", self.scale))
        if not math.isfinite(float(self.scale)):
            raise ShapeError(f"scale is {self.scale}; expected a finite number")
        put("dtype", as_dtype(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(f"dtype is {self.dtype}; a cache stores {', '.join(CACHE_DTYPES)}")
        put("joint", flag("joint", self.joint))
        put("latent_scale", as_float("latent_scale", self.latent_scale))
        self._check_format()

    def _check_format(self) -> None:
        if self.format is not None and not (isinstance(self.format, str) and self.format in LATENT_FORMATS):
            raise UnsupportedOption(f"format is {shown(self.format)}; use one of {', '.join(LATENT_FORMATS)}, or None")
        factor = float(self.latent_scale)
        if not (math.isfinite(factor) and factor > 0):
            raise ShapeError(f"latent_scale is {factor}; expected a finite number above 0")
        if factor != 1.0 and self.format != "float8_e4m3fn":
            raise UnsupportedOption(
                f"latent_scale is {factor}, but format {self.format!r} takes no factor; use 'float8_e4m3fn', or "
                "leave it out"
            )
        if self.format not in PACKED_ROW_BYTES:
            return
        if (self.latent_dim, self.rope_dim) != PACKED_DIMS:
            raise ShapeError(
                f"latent_dim is {self.latent_dim} and rope_dim {self.rope_dim}; format {self.format!r} stores "
                f"{PACKED_DIMS[0]} and {PACKED_DIMS[1]}"
            )
        if not self.joint:
            raise UnsupportedOption(
                f"joint is False, but a row of format {self.format!r} holds both parts; leave it out"
            )

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The plane "latent", with "rope" if not joint, and with an indexer "index_key" and "index_scale".

        "latent" is ``(latent_dim + rope_dim,)``, or ``(latent_dim,)`` with "rope" ``(rope_dim,)``, in the dtype or as
        float8_e4m3fn; the packed formats are ``(656,)`` or ``(352,)`` uint8. "index_key" ``(index_dim,)`` is
        float8_e4m3fn, and "index_scale" ``(1,)`` float32.
        """
        stored = DType("float8_e4m3fn") if self.format == "float8_e4m3fn" else as_dtype(self.dtype)
        if self.format in PACKED_ROW_BYTES:
            planes: tuple[Plane, ...] = (Plane("latent", (PACKED_ROW_BYTES[self.format],), DType("uint8")),)
        elif self.joint:
            planes = (Plane("latent", (self.latent_dim + self.rope_dim,), stored),)
        else:
            planes = (Plane("latent", (self.latent_dim,), stored), Plane("rope", (self.rope_dim,), stored))
        if self.index_dim is None:
            return planes
        index_key = Plane("index_key", (self.index_dim,), DType("float8_e4m3fn"))
        return (*planes, index_key, Plane("index_scale", (1,), DType("float32")))

    def shard(self, parallel: TensorParallel) -> LatentSpec:
        """Return one rank's part of the layer: the whole latent, and the rank's query heads."""
        if self.num_query_heads is None:
            return self
        return replace(self, num_query_heads=len(parallel.query_heads(self.num_query_heads)))

    def with_dtype(self, dtype: DType | str) -> LatentSpec:
        """Return the same layer with latents of another dtype; a format stays."""
        return replace(self, dtype=dtype)

    def with_format(self, format: str | None) -> LatentSpec:
        """Return the same layer stored in a format with a factor of 1; None for no format."""
        return replace(self, format=format, latent_scale=1.0)
