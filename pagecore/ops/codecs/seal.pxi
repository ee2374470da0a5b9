"""seal_kv and unseal_kv: quantise whole blocks of new tokens, and restore their numbers."""

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport cache_array, pair_column
from pagecore.ops.arguments._arguments cimport (
    Place,
    Sealed,
    await_arrays,
    check_length,
    check_place,
    check_writable,
    find_place,
    float_tensor,
    note_written,
    sealed_planes,
    to_host,
)
from pagecore.ops.arguments._overlap cimport check_all_apart, check_own_elements
from pagecore.ops.cpu._cpu cimport check_sealed_pairs, convert_sealed_blocks as run_convert_sealed
from pagecore.ops.cuda._index_checks cimport check_not_captured
from pagecore.ops.cuda.codecs._codecs cimport convert_sealed_blocks as launch_sealed
from pagecore.ops.index_checks._index_checks cimport (
    check_index_apart,
    debugging,
    lowest_block,
    pair_ids,
)
from pagecore.ops.sealed_plane cimport SealArgs

from pagecore.errors import UnsupportedOption, shown
from pagecore.ops.arguments.sealed_blocks import SealedBlocks as _SealedBlocks

_PLANES = ("sealed key", "sealed value", "sealed key_scale", "sealed value_scale")


def seal_kv(key_cache, value_cache, sealed, pairs, *, null_block=True, stream=None):
    """Quantise whole blocks of keys and values to sealed blocks of 2 or 4 bits (KIVI).

    Keys are quantised by channel, in groups of tokens, and values by token, in groups of channels. A block can
    therefore be sealed once all of its tokens are written; newer tokens remain in the plain caches. `paged_attention`
    reads both.

    All arrays are on one device, the host or CUDA; `pairs` may be on the host. A call on CUDA is one launch for up to
    128 pairs from the host, or any number of pairs in CUDA memory. It neither allocates nor waits.

    Parameters
    ----------
    key_cache, value_cache : array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Plain caches of the newest tokens: float32, float16 or bfloat16. D and Dv are multiples of 16. The last axis is
        contiguous; other strides are free.
    sealed : SealedBlocks
        The arrays that are written, with blocks of the same size. Their shapes determine bits and groups; `block_table`
        and `lens` are not used.
    pairs : integers, [n, 2]
        (block of the plain caches, sealed block). No sealed block may occur twice. Pairs in CUDA memory are checked
        under `debug` only; otherwise pairs with a block outside of its cache are skipped, and a sealed block that
        occurs twice mixes both.
    null_block : bool
        Refuse block 0 of the plain caches and of the sealed planes: the null block of the caches of pagecore.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `key_cache`.

    Raises
    ------
    InvalidBlock
        A block is outside of its cache, or the null block, or is sealed twice. See `pairs` for CUDA memory.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are not supported, or cannot be written. After every error nothing was written.

    Notes
    -----
    The codes are those of `quantize` with "kivi2" or "kivi4": of a block of keys ``[Hkv, block_size, D]`` with axis -2,
    of values with axis -1; scales are rounded to their own dtype. A NaN makes its group NaN: of keys, its channel in
    the tokens of the group. KIVI: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> new = np.ones((3, 32, 2, 64), np.float32)  # keys, and as values, of 3 blocks of 32 tokens, 2 heads
    >>> sealed = pagecore.SealedBlocks(
    ...     key=np.zeros((8, 2, 2, 64), np.int32), key_scale=np.zeros((8, 2, 1, 2, 64), np.float32),
    ...     value=np.zeros((8, 32, 2, 4), np.int32), value_scale=np.zeros((8, 32, 2, 2, 2), np.float32))
    >>> pagecore.seal_kv(new, new, sealed, [(1, 5), (2, 6)])
    >>> sealed.key_scale[5, 0, 0, :, 0]  # all numbers are 1: scale 0, least number 1
    array([0., 1.], dtype=float32)
    """
    convert_sealed(key_cache, value_cache, sealed, pairs, null_block, stream, False)


def unseal_kv(sealed, key_cache, value_cache, pairs, *, null_block=True, stream=None):
    """Write the numbers of sealed blocks to whole blocks of plain caches: the inverse of `seal_kv`, but for rounding.

    With `transfer_blocks` between plain caches and those of other formats, sealed blocks become any format.

    Parameters
    ----------
    sealed : SealedBlocks
        As in `seal_kv`; read only.
    key_cache, value_cache : array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        As in `seal_kv`, written in place: numbers are rounded to nearest even.
    pairs : integers, [n, 2]
        (sealed block, block of the plain caches). No plain block may occur twice. Pairs in CUDA memory as in `seal_kv`.
    null_block, stream
        As in `seal_kv`.

    Raises
    ------
    InvalidBlock
        A block is outside of its cache, or the null block, or is written twice. See `seal_kv` for CUDA memory.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        As `seal_kv`. After every error nothing was written.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> new, restored = np.random.default_rng(0).normal(size=(2, 3, 32, 2, 64)).astype(np.float32)
    >>> sealed = pagecore.SealedBlocks(
    ...     key=np.zeros((8, 2, 4, 64), np.int32), key_scale=np.zeros((8, 2, 1, 2, 64), np.float32),
    ...     value=np.zeros((8, 32, 2, 8), np.int32), value_scale=np.zeros((8, 32, 2, 2, 2), np.float32))
    >>> pagecore.seal_kv(new, new, sealed, [(1, 5)])
    >>> pagecore.unseal_kv(sealed, restored, restored.copy(), [(5, 2)])
    >>> bool(np.abs(restored[2] - new[1]).max() < 0.25)
    True
    """
    convert_sealed(key_cache, value_cache, sealed, pairs, null_block, stream, True)


cdef int convert_sealed(
        object key_cache, object value_cache, object sealed, object pairs, object null_block, object stream,
        bint restores) except -1:
    """Seal blocks of plain caches, or with `restores` fill them."""
    cdef Place place
    cdef SealArgs args
    if not isinstance(sealed, _SealedBlocks):
        raise UnsupportedOption(f"sealed is {shown(sealed)}; pass a SealedBlocks")
    cdef Tensor key = float_tensor(key_cache, "key_cache", 4, 1, "[num_blocks, block_size, num_kv_heads, head_dim]")
    find_place(&place, key, "key_cache", key_cache, stream)
    cdef Tensor value = float_tensor(
        value_cache, "value_cache", 4, 1, "[num_blocks, block_size, num_kv_heads, head_dim]")
    check_place(value, "value_cache", &place)
    check_length(value, "value_cache", 1, key.shape_[1], "the block_size of key_cache")
    check_length(value, "value_cache", 2, key.shape_[2], "the heads of key_cache")
    cdef Sealed planes = sealed_planes(
        sealed.key, sealed.value, sealed.key_scale, sealed.value_scale, key, value, &place)
    cdef list stored = [planes.key, planes.value, planes.key_scale, planes.value_scale]
    cdef list written = [key, value] if restores else stored
    cdef str label = "cache" if restores else "sealed"
    for name, array in zip(("key_cache", "value_cache") if restores else _PLANES, written):
        check_writable(array, name)
        check_own_elements(array, name)
    check_all_apart(written, label, stored if restores else [key, value], "sealed" if restores else "cache", True)
    cdef Tensor ids = pair_ids(pairs, &place)
    if ids is None:
        return 0
    check_index_apart(written, label, True, ids, "pairs")
    args.key, args.value = cache_array(key), cache_array(value)
    args.sealed_key, args.sealed_value = planes.blocks.key, planes.blocks.value
    args.num_sealed, args.lowest = planes.blocks.num_blocks, lowest_block(null_block)
    args.sources, args.targets = pair_column(ids, 0), pair_column(ids, 1)
    if place.device_type == CPU:
        return run_convert_sealed(args, restores)
    await_arrays((key_cache, value_cache, *sealed[:4], pairs), &place)
    if ids.device_type == CPU:
        check_sealed_pairs(args, restores)
    elif debugging():
        check_pairs_under_debug(args, ids, restores, &place)
    launch_sealed(args, ids, restores, &place)
    for array in written:
        note_written(<Tensor>array, &place)
    return 0


cdef int check_pairs_under_debug(SealArgs args, Tensor ids, bint restores, const Place* place) except -1:
    check_not_captured(place)
    cdef Tensor here = to_host(ids, place)
    args.sources, args.targets = pair_column(here, 0), pair_column(here, 1)
    return check_sealed_pairs(args, restores)
