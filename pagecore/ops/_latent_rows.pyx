"""write_latent and gather_latent: check the arguments, call the kernel."""

from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU
from pagecore.ops._checks cimport any_tensor, check_length, check_writable, float_tensor
from pagecore.ops._indices cimport given_indices, index_tensor
from pagecore.ops._latent_cache cimport LatentPlanes, columns_of, latent_factor, latent_planes, one_head
from pagecore.ops._overlap cimport check_apart, check_own_elements
from pagecore.ops._place cimport Place, await_arrays, check_place, find_place, finished, new_result
from pagecore.ops.args cimport index_array
from pagecore.ops.cpu._cpu cimport gather_latent as run_gather, total_tokens, write_latent as run_write
from pagecore.ops.cpu.latent cimport LatentWriteArgs

from pagecore.arrays import as_dtype
from pagecore.arrays.dtypes import DTYPES
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops._write import write_kv


def write_latent(latent, rope, latent_cache, rope_cache, slot_mapping, *, format=None, scale=None, stream=None):
    """Write new latent and rope rows to slots of a latent cache.

    Plain caches may be on the host or on CUDA; the other formats are written on the host.

    Parameters
    ----------
    latent, rope : array, [T, L] and [T, R]
        float32, float16 or bfloat16. The last axis is contiguous, here and below; other strides are free.
    latent_cache : array, [num_blocks, block_size, row]
        Written in place. Its dtype and row determine the format:

        - float32, float16 or bfloat16: plain numbers, row = L + R;
        - float8_e4m3fn: codes of ``number / scale``, saturating, to nearest even, row = L + R;
        - uint8, row = 656: "fp8_ds_mla" of FlashMLA and vLLM, 512 e4m3 codes, 4 float32 scales, one for 128 codes and a
          power of two, and 64 bfloat16 rope numbers;
        - uint8, row = 352: "nvfp4_ds_mla" of vLLM, 256 bytes of two e2m1 codes, 64 e4m3 rope codes, and 32 e4m3 scales,
          one for 16 codes, of which scale s is at byte ``320 + 8 * (s % 4) + s // 4``.

        Rows of the uint8 formats start at multiples of 16 bytes.
    rope_cache : array, [num_blocks, block_size, R], or None
        Plane of the rope numbers, in the dtype of `latent_cache`, whose row then is L. None if `latent_cache` holds
        both parts, latent first.
    slot_mapping : integers, [T'], T' <= T
        Slot ``block * block_size + offset`` of each token. Tokens with a negative slot, and tokens from T' on, are not
        written. If two tokens have one slot, the host keeps the later one.
    format : str, optional
        "float8_e4m3fn", "fp8_ds_mla" or "nvfp4_ds_mla"; the cache must have it.
    scale : float, optional
        Factor of the codes of "float8_e4m3fn"; 1 by default.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work.

    Raises
    ------
    InvalidBlock
        A slot is outside the cache.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are misaligned, not supported, or cannot be written. After every error nothing
        has been written.

    Notes
    -----
    NaN remains NaN, except in "nvfp4_ds_mla", where a NaN of the latent becomes 0.

    Multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", 2024.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.zeros((4, 64, 576), np.float32)
    >>> pagecore.write_latent(np.ones((2, 512), np.float32), np.ones((2, 64), np.float32), cache, None, [70, -1])
    >>> cache[1, 6].sum()
    np.float32(576.0)
    """
    cdef Place place
    cdef Tensor numbers = float_tensor(latent, "latent", 2, 1, "[num_tokens, latent_dim]")
    find_place(&place, numbers, "latent", latent, stream)
    cdef Tensor turned = float_tensor(rope, "rope", 2, 1, "[num_tokens, rope_dim]")
    check_place(turned, "rope", &place)
    check_length(turned, "rope", 0, numbers.shape_[0], "the tokens of latent")
    cdef int64_t latent_dim = numbers.shape_[1], rope_dim = turned.shape_[1]
    cdef LatentPlanes planes = latent_planes(latent_cache, rope_cache, format, latent_dim, rope_dim, &place)
    cdef double factor = latent_factor(scale, "scale", planes)
    check_writable(planes.latent, "latent_cache")
    check_own_elements(planes.latent, "latent_cache")
    if planes.rope is not None:
        check_writable(planes.rope, "rope_cache")
        check_own_elements(planes.rope, "rope_cache")
        check_apart(planes.latent, "latent_cache", planes.rope, "rope_cache")
    cdef Tensor slots = given_indices(slot_mapping, "slot_mapping", 1, "[at most num_tokens]", &place)
    if slots.shape_[0] > numbers.shape_[0]:
        raise ShapeError(
            f"slot_mapping has {slots.shape_[0]} slots for {numbers.shape_[0]} tokens; it must not have more")
    for read, name in ((numbers, "latent"), (turned, "rope"), (slots, "slot_mapping")):
        check_apart(planes.latent, "latent_cache", read, name)
        check_apart(planes.rope, "rope_cache", read, name) if planes.rope is not None else None
    cdef LatentWriteArgs args
    if not planes.format:
        rope_plane = (
            columns_of(planes.latent, latent_dim, rope_dim)
            if planes.rope is None else columns_of(planes.rope, 0, rope_dim))
        if place.device_type != CPU:
            await_arrays((latent, rope, latent_cache, rope_cache, slot_mapping), &place)
        write_kv(
            columns_of(numbers, 0, latent_dim), columns_of(turned, 0, rope_dim),
            columns_of(planes.latent, 0, latent_dim), rope_plane, slots,
            stream=None if place.device_type == CPU else place.stream)
        return
    check_host(&place, f"writes of {planes.format}")
    args.latent, args.rope = one_head(numbers), one_head(turned)
    args.cache = planes.native
    args.slots = index_array(slots)
    args.factor = <float>factor
    run_write(args)


cdef int check_host(const Place* place, str what) except -1:
    if place.device_type != CPU:
        raise UnsupportedOption(f"{what} run on the host only, and the arrays are on CUDA; copy them to the host")
    return 0


def gather_latent(
    latent_cache, rope_cache, block_table, seq_lens, *, rows=None, format=None, latent_scale=None, dtype="float32"
):
    """Copy the rows of sequences out of a latent cache, dequantised, for prefill with expanded keys. Host arrays only.

    Parameters
    ----------
    latent_cache, rope_cache : array
        As for `write_latent`.
    block_table, seq_lens, rows
        As for `paged_attention`. Tokens of the null block, 0, become zeros.
    format : str, optional
    latent_scale : float, optional
        Factor of the codes of "float8_e4m3fn"; 1 by default.
    dtype : {"float32", "bfloat16", "float16"}
        Dtype of the result, rounded to nearest even.

    Returns
    -------
    array, [sum(seq_lens), L + R]
        Latent, then rope, of each token; the sequences follow each other. A new array in the framework of
        `latent_cache`.

    Raises
    ------
    InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid ids, lengths or arrays.
    """
    cdef Place place
    cdef Tensor example = any_tensor(latent_cache, "latent_cache")
    find_place(&place, example, "latent_cache", latent_cache, None)
    if place.device_type != CPU:
        raise UnsupportedOption(
            "latent_cache is on CUDA; gather_latent runs on the host only: copy the arrays there")
    cdef LatentPlanes planes = latent_planes(latent_cache, rope_cache, format, 0, -1, &place)
    cdef double factor = latent_factor(latent_scale, "latent_scale", planes)
    wanted = as_dtype(dtype)
    if wanted not in ("float32", "bfloat16", "float16"):
        raise UnsupportedDtype(f"dtype is {wanted}; use float32, bfloat16 or float16")
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", &place)
    cdef Tensor table = index_tensor(block_table, "block_table", 2, "[num_sequences, max_blocks]", &place)
    cdef Tensor picked = None
    if rows is None:
        check_length(
            table, "block_table", 0, lens.shape_[0], "one row for each of seq_lens, or pass rows= to pick some")
    else:
        picked = index_tensor(rows, "rows", 1, "[num_sequences]", &place)
        check_length(picked, "rows", 0, lens.shape_[0], "one for each of seq_lens")
    cdef int64_t shape[2]
    shape[0] = total_tokens(lens, table.shape_[1], planes.native.block_size)
    shape[1] = planes.native.latent_dim + planes.native.rope_dim
    cdef Tensor result = new_result(2, shape, DTYPES.index(wanted), latent_cache, &place)
    run_gather(planes.native, factor, table, lens, picked, result)
    return finished(result, latent_cache, &place)
