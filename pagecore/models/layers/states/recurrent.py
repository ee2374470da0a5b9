"""Recurrent states of a config: the layers that keep one, its planes, and the chunks of its kernel.

Source: the configuration and modeling files of transformers 5; planes as engines store them (`storage.state_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype
from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.kinds import kimi_fields
from pagecore.storage import Plane, StateSpec
from pagecore.storage.checks import ceil_div
from pagecore.storage.specs.spec import CACHE_DTYPES
from pagecore.storage.state_shapes import (
    STATE_DTYPE,
    cca_planes,
    delta_planes,
    lightning_planes,
    mamba1_planes,
    mamba2_planes,
    rg_lru_planes,
    short_conv_planes,
)

__all__ = [
    "Dtypes",
    "Planes",
    "States",
    "chunk_of",
    "chunk_of_64",
    "convolution_of_zaya",
    "delta_rule",
    "delta_rule_of_olmo",
    "delta_rule_of_qwen_4",
    "kimi_delta_rule",
    "lightning_attention",
    "lightning_chunk",
    "mamba_1",
    "mamba_1_of_jamba",
    "mamba_2",
    "recurrent_unit",
    "short_convolution",
    "state_spec",
]

# Tokens between two checkpoints while decoding, unless the chunk is larger.
INTERVAL = 256

Planes = Callable[..., tuple[Plane, ...]]
Kinds = Callable[[Fields, int], Sequence[str]]


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of the window of a convolution and of a recurrent state."""

    window: DType
    state: DType


def _every_token(_fields: Fields) -> int:
    """Return 1: the kernel can keep a state after any token."""
    return 1


@dataclass(frozen=True)
class States:
    """Differences of a family whose layers keep recurrent states.

    Parameters
    ----------
    kinds : callable
        Returns the kind of each layer (see `layer_kinds`) from fields and the number of layers.
    planes : callable
        Returns, from fields and dtypes, a function of ``ranks`` that returns the planes of a rank.
    chunk : callable
        Returns the tokens that the kernel of the layers processes together.
    dtype_field : str, optional
        Field that names the dtype of the recurrent state; float32 if it is null or missing.
    planes_of_layer : callable, optional
        Returns what `planes` returns, from fields, dtypes and the number of a layer, if layers differ.
    """

    kinds: Kinds
    planes: Callable[[Fields, Dtypes], Planes]
    chunk: Callable[[Fields], int] = _every_token
    dtype_field: str | None = None
    planes_of_layer: Callable[[Fields, Dtypes, int], Planes] | None = None


def state_spec(fields: Fields, states: States, dtype: DType, layer: int) -> StateSpec:
    """Return the spec of a layer that keeps a state; `dtype` is that of the convolution's window.

    Raises
    ------
    ConfigError
        A missing or invalid field, or fields that contradict each other.
    UnsupportedDtype
        A dtype that no state has.
    """
    dtypes = Dtypes(dtype, _state_dtype(fields, states.dtype_field))
    by_layer = states.planes_of_layer
    split = states.planes(fields, dtypes) if by_layer is None else by_layer(fields, dtypes, layer)
    chunk = states.chunk(fields)
    interval = ceil_div(INTERVAL, chunk) * chunk
    try:
        planes = split(ranks=1)
    except ShapeError as error:  # sizes that are valid each, and too large together
        fields.refuse(f"the state of a layer cannot be stored: {error}")
    return StateSpec(planes, chunk=chunk, interval=interval, split=split)


def _state_dtype(fields: Fields, name: str | None) -> DType:
    given = None if name is None else fields.given(name)
    if given is None:
        return as_dtype(STATE_DTYPE)
    stripped = given.removeprefix("torch.") if isinstance(given, str) else ""
    if stripped not in CACHE_DTYPES:
        raise UnsupportedDtype(
            f"{fields.source}: {fields.describe(str(name))}; a recurrent state is one of {', '.join(CACHE_DTYPES)}"
        )
    return as_dtype(stripped)


def delta_rule(fields: Fields, dtypes: Dtypes) -> Planes:
    """Gated delta rule of Qwen3-Next and Qwen3.5."""
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim", min=2)
    sizes = (key_heads, value_heads, key_dim, value_dim, kernel)
    return partial(delta_planes, *sizes, dtype=dtypes.window, state_dtype=dtypes.state)


def delta_rule_of_qwen_4(fields: Fields, dtypes: Dtypes, layer: int) -> Planes:
    """Gated delta rule of Qwen4, and in some layers a convolution of n-grams, of which every rank has a copy."""
    own = delta_rule(fields, dtypes)
    if layer + 1 not in (fields.value("ple_layer_ids") or ()):
        return own
    channels = fields.integer("hc_count") * fields.integer("hidden_size")
    kept = (fields.integer("ple_conv_kernel_size", min=2) - 1) * fields.integer("ngram_size")
    ngrams = Plane("ngram_conv", (channels, kept), dtypes.window, per="sequence")
    return lambda ranks=1: (*own(ranks=ranks), ngrams)


def delta_rule_of_olmo(fields: Fields, dtypes: Dtypes) -> Planes:
    """Gated delta rule of Olmo Hybrid, whose heads and dims follow from those of attention unless they are given."""

    def integer(name: str, default: int) -> int:
        return default if fields.value(name) is None else fields.integer(name)

    heads = fields.integer("num_attention_heads")
    key_heads, value_heads = integer("linear_num_key_heads", heads), integer("linear_num_value_heads", heads)
    key_dim = integer("linear_key_head_dim", 3 * fields.integer("hidden_size") // (4 * key_heads))
    value_dim = integer("linear_value_head_dim", 2 * key_dim)
    kernel = fields.integer("linear_conv_kernel_dim", min=2)
    sizes = (key_heads, value_heads, key_dim, value_dim, kernel)
    return partial(delta_planes, *sizes, dtype=dtypes.window, state_dtype=dtypes.state)


def kimi_delta_rule(fields: Fields, dtypes: Dtypes) -> Planes:
    """Kimi delta attention: equal numbers of key heads and value heads, and equal dims."""
    inner = kimi_fields(fields)

    def integer(short: str, long: str, min: int = 1) -> int:
        is_nested = inner is not None and inner.given(short) is not None
        return inner.integer(short, min) if is_nested and inner is not None else fields.integer(long, min)

    heads, dim = integer("num_heads", "linear_num_heads"), integer("head_dim", "linear_head_dim")
    kernel = integer("short_conv_kernel_size", "linear_conv_kernel_dim", min=2)
    return partial(delta_planes, heads, heads, dim, dim, kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def lightning_attention(fields: Fields, dtypes: Dtypes) -> Planes:
    """Lightning attention of MiniMax-Text-01, with the heads and the dim of its attention."""
    heads = fields.integer("num_attention_heads")
    is_given = fields.given("head_dim") is not None
    dim = fields.integer("head_dim") if is_given else fields.integer("hidden_size") // heads
    return partial(lightning_planes, heads, dim, state_dtype=dtypes.state)


def recurrent_unit(fields: Fields, dtypes: Dtypes) -> Planes:
    """Real-gated linear recurrent unit of RecurrentGemma."""
    name = "hidden_size" if fields.value("lru_width") is None else "lru_width"
    kernel = fields.integer("conv1d_width", min=2)
    return partial(rg_lru_planes, fields.integer(name), kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def mamba_1(fields: Fields, dtypes: Dtypes) -> Planes:
    """Mamba of Mamba and Falcon-Mamba; `intermediate_size` takes precedence over `expand`."""
    channels = (
        fields.integer("intermediate_size")
        if fields.given("intermediate_size") is not None
        else fields.integer("hidden_size") * fields.integer("expand")
    )
    state, kernel = fields.integer("state_size"), fields.integer("conv_kernel", min=2)
    return partial(mamba1_planes, channels, state, kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def mamba_1_of_jamba(fields: Fields, dtypes: Dtypes) -> Planes:
    """Mamba of Jamba."""
    channels = fields.integer("hidden_size") * fields.integer("mamba_expand")
    state, kernel = fields.integer("mamba_d_state"), fields.integer("mamba_d_conv", min=2)
    return partial(mamba1_planes, channels, state, kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def mamba_2(
    heads: str, head_dim: str, groups: str, state: str, kernel: str, expand: str | None, width: str | None = None
) -> Callable[[Fields, Dtypes], Planes]:
    """Return a reader of Mamba-2 layers whose fields have the given names.

    `expand` is a multiple of hidden_size, and `width`, if it is not null, replaces the product; without both the
    channels are ``heads * head_dim``. A head_dim of "auto" or null, or without a name, is computed from the channels.
    """

    def planes(fields: Fields, dtypes: Dtypes) -> Planes:
        count = fields.integer(heads)
        source = fields.name(head_dim)
        if width is not None and fields.value(width) is not None:
            channels, source = fields.integer(width), fields.name(width)
        elif expand is not None:
            channels = fields.integer("hidden_size") * fields.integer(expand)
            source = f"{fields.name('hidden_size')} times {fields.name(expand)}" + (
                f", without {width}," if width else ""
            )
        else:
            channels = count * fields.integer(head_dim)
        automatic = not head_dim or fields.value(head_dim) in (None, "auto")
        dim = channels // count if automatic else fields.integer(head_dim)
        if dim * count != channels:
            own = f" and {fields.describe(head_dim)}" if head_dim else ""
            fields.refuse(
                f"{fields.describe(heads)}{own}; heads of {dim} channels must have {channels} channels together, which "
                f"{source} is"
            )
        sizes = (fields.integer(groups), count, dim, fields.integer(state), fields.integer(kernel, min=2))
        return partial(mamba2_planes, channels, *sizes, dtype=dtypes.window, state_dtype=dtypes.state)

    return planes


def convolution_of_zaya(fields: Fields, dtypes: Dtypes) -> Planes:
    """Convolutions of the queries and keys of ZAYA, and the part of the values that a token passes to the next."""
    queries, keys = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim, kernel = fields.integer("head_dim"), fields.integer("cca_time0") + fields.integer("cca_time1") - 1
    if kernel < 2:
        fields.refuse(f"{fields.describe('cca_time0')} and {fields.describe('cca_time1')}; one must be 2 or more")
    if keys * dim % 2:
        fields.refuse(
            f"{fields.describe('head_dim')} with {keys} key-value heads; their product must be even, because half of "
            "the values come from the token before"
        )
    return partial(cca_planes, queries, keys, dim, kernel, dtype=dtypes.window)


def short_convolution(fields: Fields, dtypes: Dtypes) -> Planes:
    """Gated short convolution of LFM2."""
    kernel = fields.integer("conv_L_cache", min=2)
    return partial(short_conv_planes, fields.integer("hidden_size"), kernel, dtype=dtypes.window)


def chunk_of(name: str) -> Callable[[Fields], int]:
    """Return a reader of the chunk of a Mamba-2 kernel."""
    return lambda fields: fields.integer(name)


def lightning_chunk(_fields: Fields) -> int:
    """Return 256, the chunk of the kernels of lightning attention."""
    return 256


def chunk_of_64(_fields: Fields) -> int:
    """Return 64, the chunk of the kernels of the delta rule."""
    return 64
