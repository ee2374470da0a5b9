"""write_kv: check the arguments, call the kernel."""

from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU
from pagecore.ops._checks cimport (
    cache_tensor,
    check_caches,
    check_length,
    check_writable,
    float_tensor,
)
from pagecore.ops._debug cimport debug_slots, debugging
from pagecore.ops._indices cimport given_indices
from pagecore.ops._numbers cimport divisors, scale_numbers
from pagecore.ops._overlap cimport (
    ByteRange,
    are_nested,
    check_apart,
    check_own_elements,
    range_of,
    ranges_meet,
)
from pagecore.ops._place cimport Place, await_arrays, check_place, find_place, to_device
from pagecore.ops._summaries cimport KeySummary, read_summary
from pagecore.ops.cpu._cpu cimport check_slots, write_kv as run_write
from pagecore.ops.cuda._moves cimport write_kv as launch_write

from pagecore.errors import ShapeError


def write_kv(
    key, value, key_cache, value_cache, slot_mapping, *, key_scale=None, value_scale=None, key_min=None, key_max=None,
    label=None, label_channels=None, stream=None,
):
    """Write new keys and values to slots of a paged cache, with a cast and optional scaling.

    All arrays are on one device, the host or CUDA. A call on CUDA is one launch, or two if the dtypes of key and value
    or of their caches differ. It neither allocates nor waits unless index arrays or scales are on the host.

    Parameters
    ----------
    key, value : array, [T, Hkv, D] and [T, Hkv, Dv]
        float32, float16 or bfloat16. The last axis is contiguous, here and below; other strides are free.
    key_cache, value_cache : array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Written in place, each in its own dtype (float32, float16 or bfloat16), rounded to nearest even. They must not
        overlap each other or another argument. Interleaved slices of one array do not overlap.
    slot_mapping : integers, [T'], T' <= T
        Slot ``block * block_size + offset`` of each token. Tokens with a negative slot, and tokens from T' on, are not
        written. If two tokens have one slot, the host keeps the later one, and CUDA keeps either or a mixture of both.
        For CUDA arrays a list or host array is copied to the device.
    key_scale, value_scale : float or [Hkv], optional
        Factors of the stored numbers: new keys or values are divided by them. An array on CUDA is float32; for CUDA
        arrays one on the host is copied to the device.
    key_min, key_max : array, [num_blocks, Hkv, D], optional
        On the host: element-wise bounds of the keys of each block, for `score_blocks`. They are extended by the new
        keys, rounded to their dtype. A key in the first slot of a block starts the bounds of the block anew, so blocks
        must be filled from their first slot on; overwriting a later slot only widens them.
    label : array, [num_blocks, block_size, Hkv, S], optional
        On the host: the channels `label_channels` of each key, for `score_tokens`.
    label_channels : integers, [Hkv, S], optional
        Channels of each head, 0 to D - 1; given with `label`.
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

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.zeros((2, 4, 4, 16, 8), np.float32)  # key and value of 4 blocks of 4 tokens, 16 heads of 8
    >>> new = np.ones((3, 16, 8), np.float32)
    >>> pagecore.write_kv(new, new, cache[0], cache[1], slot_mapping=[6, 7, -1])
    >>> cache[0, 1, :, 0, 0]
    array([0., 0., 1., 1.], dtype=float32)
    """
    cdef Place place
    cdef Tensor k = float_tensor(key, "key", 3, 1, "[num_tokens, num_kv_heads, head_dim]")
    find_place(&place, k, "key", key, stream)
    cdef Tensor v = float_tensor(value, "value", 3, 1, "[num_tokens, num_kv_heads, head_dim]")
    cdef Tensor keys = cache_tensor(key_cache, "key_cache")
    cdef Tensor values = cache_tensor(value_cache, "value_cache")
    check_place(v, "value", &place)
    check_place(keys, "key_cache", &place)
    check_place(values, "value_cache", &place)
    check_caches(keys, values)
    check_length(v, "value", 0, k.shape_[0], "the tokens of key")
    if k.shape_[1] != keys.shape_[2] or v.shape_[1] != values.shape_[2]:
        refuse_heads(k, v, keys.shape_[2])
    check_length(k, "key", 2, keys.shape_[3], "the head_dim of key_cache")
    check_length(v, "value", 2, values.shape_[3], "the head_dim of value_cache")
    check_writable(keys, "key_cache")
    check_writable(values, "value_cache")
    cdef Tensor slots = given_indices(slot_mapping, "slot_mapping", 1, "[at most num_tokens]", &place)
    if slots.shape_[0] > k.shape_[0]:
        raise ShapeError(f"slot_mapping has {slots.shape_[0]} slots for {k.shape_[0]} tokens; it must not have more")
    cdef KeySummary summary = None
    if key_min is not None or key_max is not None or label is not None or label_channels is not None:
        summary = read_summary(
            key_min, key_max, label, label_channels, k, keys, slots,
            ((k, "key"), (v, "value"), (keys, "key_cache"), (values, "value_cache"), (slots, "slot_mapping")), &place)
    cdef Tensor key_scales, value_scales
    cdef float key_divisor, value_divisor
    if place.device_type == CPU:
        key_scales = scale_numbers(key_scale, "key_scale", keys.shape_[2], True, &place)
        value_scales = scale_numbers(value_scale, "value_scale", keys.shape_[2], True, &place)
        check_memory(k, v, keys, values, slots, key_scales, value_scales)
        run_write(k, v, keys, values, slots, key_scales, value_scales)
        if summary is not None:
            summary.run()
        return
    key_scales = divisors(key_scale, "key_scale", keys.shape_[2], &place, &key_divisor)
    value_scales = divisors(value_scale, "value_scale", keys.shape_[2], &place, &value_divisor)
    check_memory(k, v, keys, values, slots, key_scales, value_scales)
    await_arrays((key, value, slot_mapping, key_scale, value_scale), &place)
    if slots.device_type == CPU:
        check_slots(slots, k, keys)
    elif debugging():
        debug_slots(slots, k, keys, &place)
    slots = to_device(slots, "slot_mapping", &place)
    launch_write(
        k, v, keys, values, slots, key_scales, key_divisor, value_scales, value_divisor, &place
    )


cdef int check_memory(
        Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slots, Tensor key_scale,
        Tensor value_scale) except -1:
    """Raise an error if the caches overlap each other, an input, or themselves."""
    cdef ByteRange keys = range_of(key_cache), values = range_of(value_cache)
    cdef ByteRange each
    if not are_nested(key_cache):
        check_own_elements(key_cache, "key_cache")
    if not are_nested(value_cache):
        check_own_elements(value_cache, "value_cache")
    if ranges_meet(keys, values):
        check_apart(key_cache, "key_cache", value_cache, "value_cache")
    each = range_of(key)
    if ranges_meet(each, keys) or ranges_meet(each, values):
        check_read(key, "key", key_cache, value_cache)
    each = range_of(value)
    if ranges_meet(each, keys) or ranges_meet(each, values):
        check_read(value, "value", key_cache, value_cache)
    each = range_of(slots)
    if ranges_meet(each, keys) or ranges_meet(each, values):
        check_read(slots, "slot_mapping", key_cache, value_cache)
    if key_scale is not None:
        check_read(key_scale, "key_scale", key_cache, value_cache)
    if value_scale is not None:
        check_read(value_scale, "value_scale", key_cache, value_cache)
    return 0


cdef int check_read(Tensor read, str name, Tensor key_cache, Tensor value_cache) except -1:
    check_apart(key_cache, "key_cache", read, name)
    return check_apart(value_cache, "value_cache", read, name)


cdef int refuse_heads(Tensor key, Tensor value, int64_t num_kv_heads) except -1:
    is_key = key.shape_[1] != num_kv_heads
    name, shape = ("key", key.shape) if is_key else ("value", value.shape)
    hint = f"; pass {name}.transpose(1, 0, 2) if its heads come first" if shape[0] == num_kv_heads else ""
    raise ShapeError(
        f"{name} has shape {shape}; axis 1 must have length {num_kv_heads}: the heads of {name}_cache, "
        f"[num_tokens, num_kv_heads, head_dim]{hint}"
    )
