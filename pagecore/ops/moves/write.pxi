"""write_kv: check the arguments, call the kernel."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    StoredCache,
    await_arrays,
    check_apart_from,
    check_length,
    check_place,
    check_stored,
    check_written,
    divisors,
    find_place,
    float_tensor,
    given_factor,
    given_indices,
    native_cache,
    read_format,
    scale_numbers,
    stored_cache,
    to_device,
)
from pagecore.ops.cpu.calls._calls cimport check_slots, write_kv as run_write
from pagecore.ops.cuda.moves._moves cimport write_kv as launch_write
from pagecore.ops.index_checks._index_checks cimport debug_slots, debugging
from pagecore.ops.sparse._sparse cimport KeySummary, read_summary

from pagecore.errors import ShapeError


def write_kv(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    key_scale=None,
    value_scale=None,
    key_global_scale=1.0,
    value_global_scale=1.0,
    format=None,
    key_min=None,
    key_max=None,
    label=None,
    label_channels=None,
    stream=None,
):
    """Write new keys and values to slots of a paged cache, with a cast or quantised.

    All arrays are on one device, the host or CUDA. A call on CUDA is one launch, or two if the dtypes of key and value
    or of their caches differ, and one more for summaries of keys. It neither allocates nor waits unless index arrays,
    scales or channels are on the host.

    Parameters
    ----------
    key, value : array, [T, Hkv, D] and [T, Hkv, Dv]
        float32, float16 or bfloat16. The last axis is contiguous, here and below; other strides are free.
    key_cache, value_cache : array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Written in place, each in its own dtype: float32, float16 or bfloat16, rounded to nearest even, or the codes of
        a format. The last axis of uint8 codes has half the length, because a byte holds two numbers, the one with the
        even index in its low nibble. Arrays that are written must not overlap each other or another argument.
        Interleaved slices of one array do not overlap.
    slot_mapping : integers, [T'], T' <= T
        Slot ``block * block_size + offset`` of each token. Tokens with a negative slot, and tokens from T' on, are not
        written. If two tokens have one slot, the host keeps the later one, and CUDA keeps either or a mixture of both.
        For CUDA arrays a list or host array is copied to the device.
    key_scale, value_scale : float, [Hkv] or array, [num_blocks, block_size, Hkv, groups], optional
        A float, or an array of one number, is a given factor of the stored numbers, as is an array with one number for
        each head: new keys or values are divided by it. An array on CUDA is float32, and its numbers are read when the
        kernels run; for CUDA arrays one on the host is copied to the device.

        An array of 4 axes is the plane of the stored scales, which the call computes and writes at the same slots. Its
        dtype and that of the codes determine the format, see Notes. groups is D / 16 or D / 32, or 1 for a scale a
        token and head, where the last axis may be absent.
    key_global_scale, value_global_scale : float
        Given factor of an "nvfp4" cache, for the layer.
    format : str, optional
        The format that both caches must have; or "nvfp4_4over6", if one of them or both are "nvfp4", which computes
        their scales so that the largest number of a group becomes 6 or 4, whichever has the smaller squared error.
    key_min, key_max : array, [num_blocks, Hkv, D], optional
        Element-wise bounds of the keys of each block, for `score_blocks`. They are extended by the new keys in their
        order, rounded to their dtype. A key in the first slot of a block resets the bounds of the block, so blocks
        must be filled from their first slot on; overwriting a later slot only widens them.
    label : array, [num_blocks, block_size, Hkv, S], optional
        The channels `label_channels` of each key, for `score_tokens`.
    label_channels : integers, [Hkv, S], optional
        Channels of each head, 0 to D - 1; given with `label`. For CUDA arrays an int32 array on the device, whose
        contents are not checked but clamped, or a list or host array, which is copied.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `key`.

    Raises
    ------
    InvalidBlock
        A slot is outside the cache. Slots in CUDA memory are checked under `debug` only; otherwise tokens with such
        slots are not written.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are not supported, or cannot be written. After every error nothing has been
        written.

    Notes
    -----
    ============== ============= ==================== ===========================================================
    format         codes         scales               numbers
    ============== ============= ==================== ===========================================================
    float8_e4m3fn  float8_e4m3fn factor               saturated
    float8_e5m2    float8_e5m2   factor               saturated
    float8_token   float8_e4m3fn float32 for a row    the largest becomes 448
    int8_token     int8          float32 for a row    the largest becomes 127; halves away from 0
    int4_token     uint8         float32 for a row    0 to 15 minus the zero point in the 4 low bits of the scale
    fp4_block16    uint8         uint8 for 16         e2m1 times ``2 ** (scale - 127)``; halves up in magnitude
    nvfp4          uint8         float8_e4m3fn for 16 e2m1 times scale and global scale
    mxfp8          float8_e4m3fn uint8 for 32         e4m3 times ``2 ** (scale - 127)``
    ============== ============= ==================== ===========================================================

    Numbers are rounded to nearest even where the table says nothing else. Infinities become the largest number of the
    format. NaN remains NaN; in int8_token and int4_token it makes its row NaN, in fp4_block16 and nvfp4 its group.

    int8_token, float8_token and int4_token: vLLM; the range of int4_token contains 0. fp4_block16: SGLang. nvfp4:
    NVIDIA, as in FlashInfer and vLLM. mxfp8: OCP Microscaling Formats, 2023.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.zeros((2, 4, 4, 16, 8), np.float32)  # key and value of 4 blocks of 4 tokens, 16 heads of 8
    >>> new = np.ones((3, 16, 8), np.float32)
    >>> pagecore.write_kv(new, new, cache[0], cache[1], slot_mapping=[6, 7, -1])
    >>> cache[0, 1, :, 0, 0]
    array([0., 0., 1., 1.], dtype=float32)
    >>> codes, scales = np.zeros((2, 4, 4, 16, 8), np.int8), np.zeros((2, 4, 4, 16, 1), np.float32)
    >>> pagecore.write_kv(new, new, codes[0], codes[1], [6, 7, -1], key_scale=scales[0], value_scale=scales[1])
    >>> codes[0, 1, :, 0, 0]
    array([  0,   0, 127, 127], dtype=int8)
    """
    cdef Place place
    cdef Tensor k = float_tensor(key, "key", 3, 1, "[num_tokens, num_kv_heads, head_dim]")
    find_place(&place, k, "key", key, stream)
    cdef Tensor v = float_tensor(value, "value", 3, 1, "[num_tokens, num_kv_heads, head_dim]")
    check_place(v, "value", &place)
    cdef StoredCache keys = stored_cache(key_cache, key_scale, "key", &place)
    cdef StoredCache values = stored_cache(value_cache, value_scale, "value", &place)
    check_stored(keys, values)
    cdef int64_t num_kv_heads = keys.codes.shape_[2]
    check_length(v, "value", 0, k.shape_[0], "the tokens of key")
    if k.shape_[1] != num_kv_heads or v.shape_[1] != num_kv_heads:
        refuse_heads(k, v, num_kv_heads)
    check_length(k, "key", 2, keys.dim, "the head_dim of key_cache")
    check_length(v, "value", 2, values.dim, "the head_dim of value_cache")
    cdef bint four_over_six = read_format(format, keys, values)
    cdef Tensor slots = given_indices(slot_mapping, "slot_mapping", 1, "[at most num_tokens]", &place)
    if slots.shape_[0] > k.shape_[0]:
        raise ShapeError(f"slot_mapping has {slots.shape_[0]} slots for {k.shape_[0]} tokens; it must not have more")
    cdef KeySummary summary = None
    if key_min is not None or key_max is not None or label is not None or label_channels is not None:
        summary = read_summary(
            key_min, key_max, label, label_channels, k, keys.codes, slots,
            ((k, "key"), (v, "value"), (slots, "slot_mapping"), (keys.codes, "key_cache"), (keys.plane, "key_scale"),
             (values.codes, "value_cache"), (values.plane, "value_scale")), &place)
    key_factor = given_factor(keys, key_scale, key_global_scale, "key")
    value_factor = given_factor(values, value_scale, value_global_scale, "value")
    cdef Tensor key_scales, value_scales
    cdef float key_divisor, value_divisor
    if place.device_type == CPU:
        key_scales = scale_numbers(key_factor, "key_scale", num_kv_heads, True, &place)
        value_scales = scale_numbers(value_factor, "value_scale", num_kv_heads, True, &place)
        check_memory(k, v, keys, values, slots, key_scales, value_scales)
        run_write(k, v, keys, values, slots, key_scales, value_scales, four_over_six)
        if summary is not None:
            summary.run()
        return
    key_scales = divisors(key_factor, "key_scale", num_kv_heads, &place, &key_divisor)
    value_scales = divisors(value_factor, "value_scale", num_kv_heads, &place, &value_divisor)
    check_memory(k, v, keys, values, slots, key_scales, value_scales)
    await_arrays((key, value, slot_mapping, key_scale, value_scale, label_channels), &place)
    if slots.device_type == CPU:
        check_slots(slots, k, keys.codes)
    elif debugging():
        debug_slots(slots, k, keys.codes, &place)
    slots = to_device(slots, "slot_mapping", &place)
    if summary is not None:
        summary.load(slots, &place)
    launch_write(
        k, v, native_cache(keys), native_cache(values), slots, key_scales, key_divisor, value_scales, value_divisor,
        four_over_six, [keys.codes, keys.plane, values.codes, values.plane], &place,
    )
    if summary is not None:
        summary.launch(slots, &place)


cdef int check_memory(
        Tensor key, Tensor value, StoredCache keys, StoredCache values, Tensor slots, Tensor key_scale,
        Tensor value_scale) except -1:
    """Raise an error if written arrays overlap each other, an input, or themselves."""
    check_written(keys, values)
    check_apart_from(keys, values, key, "key")
    check_apart_from(keys, values, value, "value")
    check_apart_from(keys, values, slots, "slot_mapping")
    check_apart_from(keys, values, key_scale, "key_scale")
    return check_apart_from(keys, values, value_scale, "value_scale")


cdef int refuse_heads(Tensor key, Tensor value, int64_t num_kv_heads) except -1:
    is_key = key.shape_[1] != num_kv_heads
    name, shape = ("key", key.shape) if is_key else ("value", value.shape)
    hint = f"; pass {name}.transpose(1, 0, 2) if its heads come first" if shape[0] == num_kv_heads else ""
    raise ShapeError(
        f"{name} has shape {shape}; axis 1 must have length {num_kv_heads}: the heads of {name}_cache, "
        f"[num_tokens, num_kv_heads, head_dim]{hint}"
    )
