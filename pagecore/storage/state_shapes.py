"""Planes of the recurrent layers of published models, for one rank of several.

Convolution planes have the layout ``[dim, kernel - 1]`` of SGLang: the inputs before the next one, oldest first. vLLM
stores ``[kernel - 1, dim]`` by default, and transformers ``[dim, kernel]``.
"""

from __future__ import annotations

from pagecore.arrays import DType
from pagecore.errors import ShapeError
from pagecore.storage.checks import require_int
from pagecore.storage.specs.spec import Plane

CONV_DTYPE = "bfloat16"
STATE_DTYPE = "float32"


def mamba1_planes(
    intermediate: int,
    state_dim: int,
    kernel: int = 4,
    *,
    ranks: int = 1,
    dtype: DType | str = CONV_DTYPE,
    state_dtype: DType | str = STATE_DTYPE,
) -> tuple[Plane, Plane]:
    """Return the planes of a Mamba layer (Gu and Dao, 2023; Falcon-Mamba): ``conv`` and ``temporal``.

    Parameters
    ----------
    intermediate : int
        Channels of the layer.
    state_dim : int
        Numbers of state for each channel.
    kernel : int
        Width of the convolution.
    ranks : int
        Ranks that split the channels.
    dtype, state_dtype : str or anything that names a dtype
        Of the convolution's window and of the recurrent state.

    Raises
    ------
    ShapeError
        A number below 1, a kernel below 2, or channels that the ranks cannot split.
    """
    channels = _split("intermediate", intermediate, ranks)
    return _conv(channels, kernel, dtype), _temporal((channels, require_int("state_dim", state_dim)), state_dtype)


def mamba2_planes(
    intermediate: int,
    groups: int,
    heads: int,
    head_dim: int,
    state_dim: int,
    kernel: int = 4,
    *,
    ranks: int = 1,
    dtype: DType | str = CONV_DTYPE,
    state_dtype: DType | str = STATE_DTYPE,
) -> tuple[Plane, Plane]:
    """Return the planes of a Mamba-2 layer (Dao and Gu, 2024): ``conv`` and ``temporal`` ``[heads, head_dim, state]``.

    Parameters
    ----------
    intermediate : int
        Channels of the layer, ``heads * head_dim``.
    groups : int
        Groups of heads that share B and C. With more ranks than groups, each rank has a group of its own.
    heads, head_dim, state_dim, kernel, ranks, dtype, state_dtype
        As in `mamba1_planes`.

    Raises
    ------
    ShapeError
        Numbers out of range, or heads or groups that the ranks can neither split nor replicate.
    """
    num_groups, num_ranks = require_int("groups", groups), require_int("ranks", ranks)
    if num_groups % num_ranks:
        if num_ranks % num_groups:
            raise ShapeError(
                f"groups is {num_groups}, which {num_ranks} ranks can neither split nor replicate; the number of ranks "
                "must divide it or be a multiple of it"
            )
        num_groups = num_ranks
    state = require_int("state_dim", state_dim)
    channels = _split("intermediate", intermediate, ranks) + 2 * (num_groups // num_ranks) * state
    shape = (_split("heads", heads, ranks), require_int("head_dim", head_dim), state)
    return _conv(channels, kernel, dtype), _temporal(shape, state_dtype)


def delta_planes(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int = 4,
    *,
    ranks: int = 1,
    dtype: DType | str = CONV_DTYPE,
    state_dtype: DType | str = STATE_DTYPE,
) -> tuple[Plane, Plane]:
    """Return the planes of a gated delta rule (Yang et al., 2024; Qwen3-Next, Kimi Linear): ``conv``, ``temporal``.

    The convolution covers queries, keys and values. The state is ``[value_heads, value_dim, key_dim]``, as SGLang and
    vLLM store it; transformers stores ``[value_heads, key_dim, value_dim]``.

    Parameters
    ----------
    key_heads, value_heads, key_dim, value_dim : int
    kernel, ranks, dtype, state_dtype
        As in `mamba1_planes`; the ranks split the heads.

    Raises
    ------
    ShapeError
        Numbers out of range, or heads that the ranks cannot split.
    """
    keys, values = _split("key_heads", key_heads, ranks), _split("value_heads", value_heads, ranks)
    of_key, of_value = require_int("key_dim", key_dim), require_int("value_dim", value_dim)
    conv = _conv(2 * keys * of_key + values * of_value, kernel, dtype)
    return conv, _temporal((values, of_value, of_key), state_dtype)


def short_conv_planes(dim: int, kernel: int = 3, *, ranks: int = 1, dtype: DType | str = CONV_DTYPE) -> tuple[Plane]:
    """Return the plane of a gated short convolution (LFM2): ``conv``; `kernel` is the config's ``conv_L_cache``.

    Raises
    ------
    ShapeError
        A number out of range, or channels that the ranks cannot split.
    """
    return (_conv(_split("dim", dim, ranks), kernel, dtype),)


def cca_planes(
    query_heads: int, kv_heads: int, head_dim: int, kernel: int, *, ranks: int = 1, dtype: DType | str = CONV_DTYPE
) -> tuple[Plane, Plane]:
    """Return the planes next to compressed convolutional attention (ZAYA): ``conv`` and ``value``.

    The convolution covers queries and keys; `kernel` is the number of tokens that it sees. Half of the channels of the
    values come from the token before.

    Raises
    ------
    ShapeError
        A number out of range, or heads that the ranks cannot split.
    """
    queries, keys = _split("query_heads", query_heads, ranks), _split("kv_heads", kv_heads, ranks)
    dim = require_int("head_dim", head_dim)
    value = Plane("value", (_split("the channels of values", keys * dim, 2),), dtype, per="sequence")  # type: ignore[arg-type]
    return _conv((queries + keys) * dim, kernel, dtype), value


def lightning_planes(
    heads: int, head_dim: int, *, ranks: int = 1, state_dtype: DType | str = STATE_DTYPE
) -> tuple[Plane]:
    """Return the plane of lightning attention (Qin et al., 2024; MiniMax, Ling): ``temporal`` ``[heads, dim, dim]``.

    Raises
    ------
    ShapeError
        A number out of range, or heads that the ranks cannot split.
    """
    dim = require_int("head_dim", head_dim)
    return (_temporal((_split("heads", heads, ranks), dim, dim), state_dtype),)


def rg_lru_planes(
    width: int,
    kernel: int = 4,
    *,
    ranks: int = 1,
    dtype: DType | str = CONV_DTYPE,
    state_dtype: DType | str = STATE_DTYPE,
) -> tuple[Plane, Plane]:
    """Return the planes of a real-gated linear recurrent unit: ``conv`` and ``temporal``.

    Source: De et al., 2024; RecurrentGemma.

    Parameters
    ----------
    width : int
        Channels of the layer, each with one number of state.
    kernel, ranks, dtype, state_dtype
        As in `mamba1_planes`.

    Raises
    ------
    ShapeError
        A number out of range, or channels that the ranks cannot split.
    """
    channels = _split("width", width, ranks)
    return _conv(channels, kernel, dtype), _temporal((channels,), state_dtype)


def rwkv_planes(
    hidden: int, width: int, *, ranks: int = 1, dtype: DType | str = CONV_DTYPE, state_dtype: DType | str = STATE_DTYPE
) -> tuple[Plane, Plane]:
    """Return the planes of an RWKV-4 layer (Peng et al., 2023): ``conv`` ``[2, hidden]``, ``temporal`` ``[3, width]``.

    The first plane has the last inputs of the feed-forward part and of attention, of which every rank has a copy. The
    second has the weighted sum of values, the sum of weights, and the exponent of both.

    Parameters
    ----------
    hidden, width : int
        Features of the model, and channels of attention.
    ranks, dtype, state_dtype
        As in `mamba1_planes`; the ranks split the channels.

    Raises
    ------
    ShapeError
        A number out of range, or channels that the ranks cannot split.
    """
    inputs = Plane("conv", (2, require_int("hidden", hidden)), dtype, per="sequence")  # type: ignore[arg-type]
    return inputs, _temporal((3, _split("width", width, ranks)), state_dtype)


def xlstm_planes(
    heads: int, key_dim: int, value_dim: int, *, ranks: int = 1, state_dtype: DType | str = STATE_DTYPE
) -> tuple[Plane, Plane, Plane]:
    """Return the planes of an mLSTM layer (Beck et al., 2024): ``temporal``, ``normaliser`` and ``maximum``.

    Their shapes are ``[heads, key_dim, value_dim]``, ``[heads, key_dim]`` and ``[heads, 1]``.

    Raises
    ------
    ShapeError
        A number out of range, or heads that the ranks cannot split.
    """
    own, keys = _split("heads", heads, ranks), require_int("key_dim", key_dim)
    return (
        _temporal((own, keys, require_int("value_dim", value_dim)), state_dtype),
        Plane("normaliser", (own, keys), state_dtype, per="sequence"),  # type: ignore[arg-type]
        Plane("maximum", (own, 1), state_dtype, per="sequence"),  # type: ignore[arg-type]
    )


def _conv(channels: int, kernel: int, dtype: DType | str) -> Plane:
    return Plane("conv", (channels, require_int("kernel", kernel, min=2) - 1), dtype, per="sequence")  # type: ignore[arg-type]


def _temporal(shape: tuple[int, ...], dtype: DType | str) -> Plane:
    return Plane("temporal", shape, dtype, per="sequence")  # type: ignore[arg-type]


def _split(name: str, value: int, ranks: int) -> int:
    """Return one rank's share of `value`."""
    number, over = require_int(name, value), require_int("ranks", ranks)
    if number % over:
        raise ShapeError(f"{name} is {number}, which {over} ranks cannot split; the number of ranks must divide it")
    return number // over
