"""LatentSpec: the spec of a layer with multi-head latent attention (MLA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from types import MappingProxyType

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import INT32_MAX, as_factor, as_float, flag, require_int, shown
from pagecore.storage.specs.parallel import TensorParallel
from pagecore.storage.specs.spec import CACHE_DTYPES, Plane

# Formats whose rows are records of bytes, and the bytes of a row of 512 + 64 numbers.
#   fp8_ds_mla    512 e4m3 | 4 float32 scales, one for 128 numbers | 64 bfloat16 of the rope part
#   nvfp4_ds_mla  256 bytes of two e2m1 | 64 e4m3 of the rope part | 32 e4m3 scales, one for 16 numbers
ROW_BYTES: Mapping[str, int] = MappingProxyType({"fp8_ds_mla": 656, "nvfp4_ds_mla": 352})
LATENT_FORMATS = ("float8_e4m3fn", *ROW_BYTES)
INDEX_FORMAT = "float8_e4m3fn"
_SCALE = "qk_head_dim ** -0.5 times mscale squared, qk_head_dim being the dim of a query head before absorption"


@dataclass(frozen=True)
class LatentSpec:
    """The stored planes and the attention options of one layer with multi-head latent attention.

    A token stores one latent vector, from which every head's key and value are computed, and one rotated key part that
    all heads share. Queries are multiplied by the key projection of their head (absorbed) and attend to the latents
    directly. Specs are values: compared by their fields, and hashable.

    Parameters
    ----------
    latent_dim, rope_dim : int
        Dimension of the latent (`kv_lora_rank`), and of the rotated part (`qk_rope_head_dim`); a rope_dim of 0 means
        that there is none.
    num_query_heads : int, optional
        Number of query heads; by default that of the query.
    scale : float
        Factor of the scores. It has no default, because it does not follow from the stored dims: it is ``qk_head_dim **
        -0.5``, where qk_head_dim is `qk_nope_head_dim` + `qk_rope_head_dim` (128 + 64 in DeepSeek-V3), times the square
        of YaRN's mscale. `specs_from_config` computes it.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of stored latents.
    window : int, optional
        Sliding window: number of keys that a query sees, including its own; by default all.
    joint : bool
        True stores latent and rope part as one row; False as two planes.
    format : str, optional
        Quantised format of the stored rows: "float8_e4m3fn" (both parts times a given factor), "fp8_ds_mla" (656 bytes;
        FlashMLA, vLLM) or "nvfp4_ds_mla" (352 bytes; vLLM). The last two are defined for dims 512 and 64. `dtype`
        remains the dtype of the model's latents.
    index_dim : int, optional
        Dimension of the keys of a sparse indexer (128 in DeepSeek-V3.2), stored with each token; by default none.
    index_format : {"float8_e4m3fn", None}
        Format of index keys: codes with a scale for each token, or None for plain numbers in `dtype`.
    key_scale : float
        Given factor of the numbers stored as "float8_e4m3fn"; the other formats compute their scales.

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
    >>> LatentSpec(num_query_heads=128, scale=192**-0.5).planes
    (Plane(name='latent', shape=(576,), dtype=DType('bfloat16'), per='token'),)
    >>> LatentSpec(scale=192**-0.5, format="fp8_ds_mla").planes[0].nbytes
    656
    """

    latent_dim: int = 512
    rope_dim: int = 64
    num_query_heads: int | None = None
    _: KW_ONLY
    scale: float
    dtype: DType | str = "bfloat16"
    window: int | None = None
    joint: bool = True
    format: str | None = None
    index_dim: int | None = None
    index_format: str | None = "float8_e4m3fn"
    key_scale: float = 1.0

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("latent_dim", require_int("latent_dim", self.latent_dim))
        put("rope_dim", require_int("rope_dim", self.rope_dim, min=0))
        if self.row_dim < 2:
            raise ShapeError("latent_dim is 1 and rope_dim 0; a row has 2 numbers or more: pad the latent")
        for name in ("num_query_heads", "window", "index_dim"):
            given = getattr(self, name)
            put(name, None if given is None else require_int(name, given, max=None if name == "window" else INT32_MAX))
        given_scale: object = self.scale
        if given_scale is None:
            raise ShapeError(f"scale is None; a latent layer has no default: give {_SCALE}")
        put("scale", as_float("scale", self.scale))
        if not math.isfinite(self.scale):
            raise ShapeError(f"scale is {self.scale}; give a finite number: {_SCALE}")
        put("dtype", as_dtype(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(f"dtype is {self.dtype}; a cache stores {', '.join(CACHE_DTYPES)}, or use format=")
        put("joint", flag("joint", self.joint))
        index_format: object = self.index_format
        if index_format is not None and not (isinstance(index_format, str) and index_format == INDEX_FORMAT):
            raise UnsupportedOption(f"index_format is {shown(index_format)}; use {INDEX_FORMAT!r}, or None for `dtype`")
        put("key_scale", as_factor("key_scale", self.key_scale))
        self._check_format()

    def _check_format(self) -> None:
        name: object = self.format
        if name is not None and not (isinstance(name, str) and name in LATENT_FORMATS):
            raise UnsupportedOption(f"format is {shown(name)}; latents are stored as {', '.join(LATENT_FORMATS)}")
        if name is not None and not self.joint:
            raise UnsupportedOption(f"joint is False, but format {name!r} stores one row a token; use joint=True")
        if name is not None and name in ROW_BYTES and (self.latent_dim, self.rope_dim) != (512, 64):
            raise ShapeError(
                f"latent_dim is {self.latent_dim} and rope_dim {self.rope_dim}; rows of {name!r} have 512 and 64 "
                "numbers: use 'float8_e4m3fn', or no format"
            )
        factor = self.key_scale
        if factor != 1.0 and self.format != "float8_e4m3fn":
            which = "a spec without a format" if self.format is None else f"format {self.format!r}, which has its own,"
            raise UnsupportedOption(f"key_scale is {factor}, but {which} takes none; leave it out")

    @property
    def row_dim(self) -> int:
        """Numbers of a token: those of the latent and of the rope part."""
        return self.latent_dim + self.rope_dim

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """One plane "latent" ``(latent_dim + rope_dim,)``, or ``(bytes,)`` uint8 for a format of byte rows.

        With ``joint=False`` it is ``(latent_dim,)`` and a plane "rope" ``(rope_dim,)`` follows, unless rope_dim is 0.
        With `index_dim` planes "index_key" ``(index_dim,)`` float8_e4m3fn and "index_scale" ``(1,)`` float32 come
        last, or with ``index_format=None`` a plane "index_key" in `dtype`.
        """
        dtype = as_dtype(self.dtype)
        if self.format is not None and self.format in ROW_BYTES:
            rows = [Plane("latent", (ROW_BYTES[self.format],), as_dtype("uint8"))]
        elif self.format is not None:
            rows = [Plane("latent", (self.row_dim,), as_dtype(self.format))]
        elif self.joint:
            rows = [Plane("latent", (self.row_dim,), dtype)]
        else:
            rows = [Plane("latent", (self.latent_dim,), dtype)]
            rows += [Plane("rope", (self.rope_dim,), dtype)] if self.rope_dim else []
        if self.index_dim is not None:
            rows.append(Plane("index_key", (self.index_dim,), as_dtype(self.index_format or dtype)))
        if self.index_dim is not None and self.index_format is not None:
            rows.append(Plane("index_scale", (1,), as_dtype("float32")))
        return tuple(rows)

    def shard(self, parallel: TensorParallel) -> LatentSpec:
        """Return one rank's part of the layer: its query heads, and all planes, since every head reads all latents."""
        if self.num_query_heads is None:
            return self
        return replace(self, num_query_heads=len(parallel.query_heads(self.num_query_heads)))

    def with_dtype(self, dtype: DType | str) -> LatentSpec:
        """Return the same layer with latents of another dtype; a format stays."""
        return replace(self, dtype=dtype)

    def with_format(self, format: str | None) -> LatentSpec:
        """Return the same layer stored in a format with a factor of 1; None for no format.

        "nvfp4" means "nvfp4_ds_mla".
        """
        return replace(self, format="nvfp4_ds_mla" if format == "nvfp4" else format, key_scale=1.0)
