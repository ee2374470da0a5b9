"""write_latent and gather_latent: check the arguments, call the kernel."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport index_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_last_axis,
    check_length,
    check_place,
    check_result,
    check_writable,
    find_place,
    finished,
    float_tensor,
    given_indices,
    new_result,
    note_written,
    to_device,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_own_elements
from pagecore.ops.cpu._cpu cimport write_latent as run_write_latent
from pagecore.ops.cpu.calls._calls cimport check_slots, gather_latent as run_gather
from pagecore.ops.cpu.latent.latent cimport LatentWriteArgs
from pagecore.ops.cuda.latent._latent cimport LatentPlaneSizes, gather_rows, write_rows
from pagecore.ops.index_checks._index_checks cimport (
    UNKNOWN,
    Sequences,
    debug_sequences,
    debug_slots,
    debugging,
    lowest_block,
    read_sequences,
    send_sequences,
)

from pagecore.arrays import as_dtype
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.moves._moves import write_kv

# Rows without a rope part are written in two parts, which are divided at a multiple of this number.
cdef int64_t SPLIT_ALIGNMENT = 8


def write_latent(latent, rope, latent_cache, rope_cache, slot_mapping, *, format=None, scale=None, stream=None):
    """Write new latent and rope rows to slots of a latent cache.

    All arrays are on one device, the host or CUDA. A call on CUDA is one launch, or two for a plain cache if the dtypes
    of latent and rope differ. It neither allocates nor waits unless slot_mapping is on the host.

    Parameters
    ----------
    latent, rope : array, [T, L] and [T, R]
        float32, float16 or bfloat16. The last axis is contiguous, here and below; other strides are free. In layers
        without a rotary part rope is None, or R is 0.
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
        written. If two tokens have one slot, the host keeps the later one, and CUDA keeps either or a mixture of both.
    format : str, optional
        "float8_e4m3fn", "fp8_ds_mla" or "nvfp4_ds_mla"; the cache must have it.
    scale : float, optional
        Factor of the codes of "float8_e4m3fn"; 1 by default.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `latent`.

    Raises
    ------
    InvalidBlock
        A slot is outside the cache. Slots in CUDA memory are checked under `debug` only; otherwise tokens with such
        slots are not written.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are misaligned, not supported, or cannot be written. After every error nothing
        has been written.

    Notes
    -----
    Infinities become the largest code of the largest scale, which "fp8_ds_mla" reads as infinity. NaN remains NaN; in
    the latent of "nvfp4_ds_mla" it makes the scale of its 16 numbers NaN, and so all of them.

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
    cdef Tensor turned = rope_part(rope, "rope", "[num_tokens, rope_dim]", numbers, &place)
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
        if place.device_type != CPU:
            await_arrays((latent, rope, latent_cache, rope_cache, slot_mapping), &place)
        write_plain(numbers, turned, planes, slots, &place)
        return
    if place.device_type != CPU:
        await_arrays((latent, rope, latent_cache, rope_cache, slot_mapping), &place)
        write_on_device(numbers, turned, planes, slots, factor, &place)
        return
    args.latent, args.rope = one_head(numbers), one_head(turned)
    args.cache = planes.native
    args.slots = index_array(slots)
    args.factor = <float>factor
    run_write_latent(args)


cdef int write_plain(
        Tensor latent, Tensor rope, LatentPlanes planes, Tensor slots, const Place* place) except -1:
    """Write the two parts of rows of plain numbers; without rope, two parts of the latent."""
    cdef int64_t width = latent.shape_[1], second = rope.shape_[1]
    cdef int64_t first = width
    cdef Tensor rest = columns_of(rope, 0, second), plane
    if second == 0:
        if width == 1:
            raise ShapeError("a row has 1 latent and 0 rope numbers; expected 2 numbers or more: pad the latent")
        first = max(width // 2 // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT, 1)
        second = width - first
        rest = columns_of(latent, first, second)
    plane = columns_of(planes.latent, first, second) if planes.rope is None else columns_of(planes.rope, 0, second)
    write_kv(
        columns_of(latent, 0, first), rest, columns_of(planes.latent, 0, first), plane, slots,
        stream=None if place.device_type == CPU else place.stream)
    return 0


cdef LatentPlaneSizes sizes_of(LatentPlanes planes) noexcept:
    cdef LatentPlaneSizes sizes
    sizes.format = <int>planes.native.format
    sizes.latent_dim, sizes.rope_dim = planes.native.latent_dim, planes.native.rope_dim
    return sizes


cdef int write_on_device(
        Tensor latent, Tensor rope, LatentPlanes planes, Tensor slots, double factor, const Place* place) except -1:
    cdef LatentPlaneSizes sizes = sizes_of(planes)
    if slots.device_type == CPU:
        check_slots(slots, latent, columns_of(planes.latent, 0, planes.latent.shape_[2]))
    elif debugging():
        debug_slots(slots, latent, columns_of(planes.latent, 0, planes.latent.shape_[2]), place)
    return write_rows(
        one_head(latent), one_head(rope), planes.latent, planes.rope, &sizes, to_device(slots, "slot_mapping", place),
        <float>factor, place)


def gather_latent(
    latent_cache,
    rope_cache,
    block_table,
    seq_lens,
    *,
    rows=None,
    null_block=True,
    format=None,
    latent_scale=None,
    dtype=None,
    out=None,
    stream=None,
):
    """Copy the rows of sequences out of a latent cache, dequantised, for prefill with expanded keys.

    All arrays are on one device, the host or CUDA; for CUDA arrays, lists and host arrays of integers are copied to the
    device. A call on CUDA with `out` and device integers is one launch, and does not wait.

    Parameters
    ----------
    latent_cache, rope_cache : array
        As for `write_latent`.
    block_table, seq_lens, rows, null_block
        As for `gather_blocks`. Tokens of the null block become zeros.
    format : str, optional
        Format of the cache, as for `write_latent`.
    latent_scale : float, optional
        Factor of the codes of "float8_e4m3fn"; 1 by default.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Dtype of the result, rounded to nearest even; by default that of `out`, or float32.
    out : array, [sum(seq_lens), L + R], optional
        Array for the result, whose last axis is contiguous. It must not share memory with the cache.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work, as for `write_latent`; by default that of `latent_cache`.

    Returns
    -------
    array, [sum(seq_lens), L + R]
        Latent, then rope, of each token; the sequences follow each other. A new array in the framework of
        `latent_cache`, or `out`.

    Raises
    ------
    InvalidBlock, InvalidSequence
        A block or row is out of range. Integers in CUDA memory are checked as by `gather_blocks`.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid lengths or arrays. After every error nothing has been written.

    Notes
    -----
    Numbers of "fp8_ds_mla" are rounded to bfloat16, as `latent_attention` reads them. This is exact if the scales are
    powers of two, as those of `write_latent` are; vLLM writes others.
    """
    cdef Place place
    cdef int64_t lowest = lowest_block(null_block)
    cdef Tensor example = any_tensor(latent_cache, "latent_cache")
    find_place(&place, example, "latent_cache", latent_cache, stream)
    cdef LatentPlanes planes = latent_planes(latent_cache, rope_cache, format, 0, -1, &place)
    cdef double factor = latent_factor(latent_scale, "latent_scale", planes)
    cdef Sequences batch = read_sequences(block_table, seq_lens, rows, [planes.latent], &place)
    cdef Tensor result = gathered(out, dtype, planes, batch, latent_cache, &place)
    if place.device_type == CPU:
        run_gather(planes.native, factor, batch.table, batch.lens, batch.rows, result, lowest)
    else:
        await_arrays((latent_cache, rope_cache, block_table, seq_lens, rows), &place)
        send_sequences(batch, [planes.latent], &place)
        gather_on_device(planes, batch, factor, result, lowest, &place)
    return finished(result, latent_cache, &place) if out is None else out


cdef Tensor gathered(
        object out, object dtype, LatentPlanes planes, Sequences batch, object example, const Place* place):
    """Return the array of the result: a new one, or `out`, checked."""
    cdef Tensor result = None if out is None else any_tensor(out, "out")
    wanted = as_dtype("float32" if dtype is None else dtype) if out is None or dtype is not None else result.dtype
    if wanted not in ("float32", "bfloat16", "float16"):
        name = "dtype" if out is None or dtype is not None else "out"
        raise UnsupportedDtype(f"{name} is {wanted}; use float32, bfloat16 or float16")
    cdef int64_t shape[2]
    shape[0], shape[1] = batch.num_tokens, planes.native.latent_dim + planes.native.rope_dim
    if out is None:
        if batch.num_tokens == UNKNOWN:
            raise UnsupportedOption(
                f"seq_lens is on {batch.lens.device}; the host cannot sum it without waiting for the device: pass "
                "out=, or seq_lens on the host")
        return new_result(2, shape, DTYPES.index(wanted), example, place)
    check_place(result, "out", place)
    if batch.num_tokens == UNKNOWN and result.ndim > 0:
        shape[0] = result.shape_[0]
    check_result(result, "out", 2, shape, DTYPES.index(wanted))
    check_last_axis(result, "out")
    for read, name in ((planes.latent, "latent_cache"), (planes.rope, "rope_cache"), (batch.table, "block_table"),
                       (batch.lens, "seq_lens"), (batch.rows, "rows")):
        check_apart(result, "out", read, name)
    return result


cdef int gather_on_device(
        LatentPlanes planes, Sequences batch, double factor, Tensor out, int64_t lowest, const Place* place) except -1:
    cdef LatentPlaneSizes sizes = sizes_of(planes)
    if debugging():
        debug_sequences([planes.latent], out, "out", batch.table, batch.lens, batch.rows, place)
    gather_rows(
        planes.latent, planes.rope, &sizes, batch.table, batch.lens, batch.rows, one_head(out),
        out.shape_[0] if batch.longest == UNKNOWN else batch.longest, lowest, <float>factor, place)
    return note_written(out, place)
