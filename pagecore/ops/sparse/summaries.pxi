"""Summaries of keys for sparse selection: checks of the planes that `write_kv` keeps up."""

from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT32, INT64, DType
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, contiguous
from pagecore.native.std cimport vector
from pagecore.ops.args cimport Cache, cache_array, index_array, token_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    check_aligned,
    check_length,
    check_place,
    check_rank,
    check_writable,
    float_tensor,
    given_indices,
    note_written,
    to_device,
    viewed,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_own_elements
from pagecore.ops.cpu._cpu cimport summarise
from pagecore.ops.cuda.sparse._sparse cimport (
    KeySummaryPlanes,
    check_summary,
    summarise as launch_summary,
    summary_kernel,
)

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption


cdef class KeySummary:
    """The planes and arguments of one write."""

    cdef int run(self) except -1:
        return summarise(self.args)

    cdef int load(self, Tensor slots, const Place* place) except -1:
        check_summary(self.planes(), index_array(slots))
        self.kernel = summary_kernel(place)
        return 0

    cdef KeySummaryPlanes planes(self) noexcept:
        cdef KeySummaryPlanes planes
        planes.key, planes.low, planes.high = self.args.key, self.args.low, self.args.high
        planes.label = self.args.label
        planes.channels = NULL
        if self.listed is not None:
            planes.channels = self.listed.data
        return planes

    cdef int launch(self, Tensor slots, const Place* place) except -1:
        launch_summary(
            self.kernel, self.planes(), index_array(slots), self.args.num_blocks, self.args.block_size, place)
        for plane in self.held[:3]:
            if plane is not None:
                note_written(<Tensor>plane, place)
        return 0


cdef KeySummary read_summary(
        object key_min, object key_max, object label, object label_channels, Tensor key, Tensor keys, Tensor slots,
        tuple others, const Place* place):
    cdef Tensor low = None, high = None, labels = None
    if (key_min is None) != (key_max is None):
        given, missing = ("key_max", "key_min") if key_min is None else ("key_min", "key_max")
        raise UnsupportedOption(f"{given} is given without {missing}; pass both bounds, or none")
    if (label is None) != (label_channels is None):
        given, missing = ("label_channels", "label") if label is None else ("label", "label_channels")
        raise UnsupportedOption(f"{given} is given without {missing}; pass both, or none")
    if key_min is None and label is None:
        return None
    cdef KeySummary summary = KeySummary()
    summary.args.key = token_array(key)
    summary.args.slots = index_array(slots)
    summary.args.num_blocks, summary.args.block_size = keys.shape_[0], keys.shape_[1]
    if key_min is not None:
        low = bounds_tensor(key_min, "key_min", key, keys, place)
        high = bounds_tensor(key_max, "key_max", key, keys, place)
        if low.dtype_code != high.dtype_code:
            raise UnsupportedDtype(f"key_min is {low.dtype} and key_max {high.dtype}; both must have one dtype")
        summary.args.low, summary.args.high = bounds_cache(low), bounds_cache(high)
        check_apart(low, "key_min", high, "key_max")
    if label is not None:
        labels = float_tensor(label, "label", 4, 1, "[num_blocks, block_size, num_kv_heads, num_channels]")
        check_plane(labels, "label", place)
        check_length(labels, "label", 0, keys.shape_[0], "the blocks of key_cache")
        check_length(labels, "label", 1, keys.shape_[1], "the block_size of key_cache")
        check_length(labels, "label", 2, key.shape_[1], "the heads of key")
        summary.listed = listed_channels(label_channels, key.shape_[1], key.shape_[2], summary.channels, place)
        check_length(labels, "label", 3, summary.listed.shape_[1], "the channels of a head in label_channels")
        check_apart(labels, "label", summary.listed, "label_channels")
        summary.args.label = cache_array(labels)
        summary.args.channels = summary.channels.data()
        check_apart(labels, "label", low, "key_min")
        check_apart(labels, "label", high, "key_max")
    for written, name in ((low, "key_min"), (high, "key_max"), (labels, "label")):
        if written is not None:
            for other, other_name in others:
                check_apart(<Tensor>written, name, <Tensor>other, other_name)
    summary.held = (low, high, labels, slots, key)
    return summary


cdef Tensor bounds_tensor(object array, str name, Tensor key, Tensor keys, const Place* place):
    cdef Tensor bounds = float_tensor(array, name, 3, 1, "[num_blocks, num_kv_heads, head_dim]")
    check_plane(bounds, name, place)
    check_length(bounds, name, 0, keys.shape_[0], "the blocks of key_cache")
    check_length(bounds, name, 1, key.shape_[1], "the heads of key")
    check_length(bounds, name, 2, key.shape_[2], "the head_dim of key")
    return bounds


cdef int check_plane(Tensor plane, str name, const Place* place) except -1:
    check_place(plane, name, place)
    check_writable(plane, name)
    return check_own_elements(plane, name)


cdef Cache bounds_cache(Tensor bounds) noexcept:
    cdef Cache cache
    cache.data = bounds.data
    cache.type = <DType>bounds.dtype_code
    cache.num_blocks, cache.num_heads, cache.dim = bounds.shape_[0], bounds.shape_[1], bounds.shape_[2]
    cache.block_stride, cache.head_stride = bounds.strides_[0], bounds.strides_[1]
    return cache


cdef Tensor listed_channels(
        object channels, int64_t num_heads, int64_t dim, vector[int32_t]& out, const Place* place):
    cdef Tensor given = viewed(channels, "label_channels")
    if given is not None and given.device_type != CPU:
        return device_channels(given, num_heads, place)
    cdef int64_t count = read_channels(channels, num_heads, dim, out)
    cdef Tensor listed = as_tensor(np.array(out, np.int32).reshape(num_heads, count))
    return listed if place.device_type == CPU else to_device(listed, "label_channels", place)


cdef Tensor device_channels(Tensor given, int64_t num_heads, const Place* place):
    check_place(given, "label_channels", place)
    if given.dtype_code != INT32:
        raise UnsupportedDtype(f"label_channels is {given.dtype} on {given.device}; it must be int32 there")
    check_rank(given, "label_channels", 2, "[num_kv_heads, num_channels]")
    check_length(given, "label_channels", 0, num_heads, "one list for each key-value head")
    if given.shape_[1] == 0 or not contiguous(given):
        raise ShapeError("label_channels is empty or not contiguous; on CUDA it must be [num_kv_heads, num_channels]")
    check_aligned(given, "label_channels")
    return given


cdef int64_t read_channels(object channels, int64_t num_heads, int64_t dim, vector[int32_t]& out) except -1:
    cdef Tensor listed = given_indices(channels, "label_channels", 2, "[num_kv_heads, num_channels]", NULL)
    cdef int64_t head, at, channel
    cdef char* entry
    check_length(listed, "label_channels", 0, num_heads, "one list for each key-value head")
    if listed.shape_[1] == 0:
        raise ShapeError("label_channels lists no channels; give at least one for each key-value head")
    out.clear()
    for head in range(num_heads):
        for at in range(listed.shape_[1]):
            entry = listed.data + head * listed.strides_[0] + at * listed.strides_[1]
            channel = (<int64_t*>entry)[0] if listed.dtype_code == INT64 else (<int32_t*>entry)[0]
            if not 0 <= channel < dim:
                raise ShapeError(
                    f"label_channels[{head}, {at}] is {channel}; expected 0 to {dim - 1}, a number of the head_dim"
                )
            out.push_back(<int32_t>channel)
    return listed.shape_[1]
