from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.arrays.tensors._tensor cimport Tensor, size_of
from pagecore.ops.args cimport Cache, Format, cache_array
from pagecore.ops.cpu.args cimport Selection, Tree
from pagecore.ops.sealed_plane cimport SealedBlocks


# checks.pxi: checks of arrays. `name` is that of the argument, for messages.

# A view of any array on the host or CUDA.
cdef inline Tensor any_tensor(object array, str name):
    return <Tensor>array if type(array) is Tensor else foreign_tensor(array, name)

# The same of an array that is not a Tensor. Errors of as_tensor are raised with the name.
cdef Tensor foreign_tensor(object array, str name)

# float32, float16 or bfloat16 of any rank and layout.
cpdef Tensor float_array(object array, str name)

# float32 of any rank and layout; `origin` is the function that returns such arrays.
cdef Tensor float32_array(object array, str name, str origin)

# Any dtype that a cache stores: those of float_array(), and codes in float8_e4m3fn, float8_e5m2, int8 and uint8.
cdef Tensor stored_array(object array, str name)

# float_array() of `ndim` axes, aligned, with a contiguous last axis. Axes from `first_full` on must not be empty;
# `axes` describes all axes in messages.
cdef Tensor float_tensor(object array, str name, int ndim, int first_full, str axes)

# True if every element starts at a multiple of its size.
cdef inline bint is_aligned(Tensor tensor) noexcept:
    cdef int64_t bits = <int64_t>tensor.data
    cdef int i
    for i in range(tensor.ndim):
        bits |= tensor.strides_[i]
    return not bits & (tensor.itemsize - 1)


# The conditions are inline, because a call makes two dozen checks. The functions of the errors raise ShapeError.
cdef inline int check_aligned(Tensor tensor, str name) except -1:
    return 0 if is_aligned(tensor) else refuse_alignment(tensor, name)


cdef inline int check_rank(Tensor tensor, str name, int ndim, str axes) except -1:
    return 0 if tensor.ndim == ndim else refuse_rank(tensor, name, ndim, axes)


cdef inline int check_last_axis(Tensor tensor, str name) except -1:
    cdef int last = tensor.ndim - 1
    if last < 0 or tensor.shape_[last] <= 1 or tensor.strides_[last] == tensor.itemsize or size_of(tensor) == 0:
        return 0
    return refuse_last_axis(tensor, name)


cdef inline int check_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1:
    return 0 if tensor.shape_[axis] == expected else refuse_length(tensor, name, axis, expected, reason)


cdef int refuse_alignment(Tensor tensor, str name) except -1
cdef int refuse_rank(Tensor tensor, str name, int ndim, str axes) except -1
cdef int refuse_last_axis(Tensor tensor, str name) except -1
cdef int refuse_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1

# Checks an array that the caller passes for a result: this shape and dtype, writable, aligned, no element twice.
cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1
cdef int check_writable(Tensor tensor, str name) except -1


# place.pxi: the device and stream of a call. `name` is that of the argument, for messages.

# The device of a call, which is that of its first array, and the stream that the call works on.
cdef struct Place:
    int device_type
    int device_id
    size_t stream    # CUDA handle, 0 is the default stream; 0 on the host
    void* name       # first argument, a string literal that outlives the call; borrowed, for messages


# Fills `place` for a call whose first array is `first`, which the caller passed as `example`. `stream` is the argument
# of that name: None is the current stream of the framework of `example`. UnsupportedOption for a stream on the host.
cdef int find_place(Place* place, Tensor first, str name, object example, object stream) except -1

# DeviceError if the array is not on the device of the call.
cdef int check_place(Tensor tensor, str name, const Place* place) except -1

# The same check for an array in device memory that may also be an argument of a call on the host (place is NULL).
cdef int check_reachable(Tensor tensor, str name, const Place* place) except -1

# A new C-contiguous tensor with undefined elements, as workspace of the call.
cdef Tensor new_at(int ndim, const int64_t* shape, int dtype_code, const Place* place)

# A new C-contiguous tensor for a result. `finished` returns it as an array of the framework of `example`, once the work
# that writes it is launched.
cdef Tensor new_result(int ndim, const int64_t* shape, int dtype_code, object example, const Place* place)
cdef object finished(Tensor result, object example, const Place* place)

# On CUDA: make the stream of the call wait for the work that computes `arrays`, and record that the stream writes to a
# tensor, so that a later consumer of its memory waits.
cdef int await_arrays(tuple arrays, const Place* place) except -1
cdef int note_written(Tensor tensor, const Place* place) except -1

# A C-contiguous copy of a host tensor on the device of the call, in the order of its stream; the tensor itself if it is
# there already or `place` is NULL.
cdef Tensor to_device(Tensor tensor, str name, const Place* place)

# True if all tensors are on the host. Entries may be None.
cdef bint are_on_host(tuple tensors) noexcept

# A copy on the host with the strides that the tensor has on the device; waits for the stream. A host tensor, or None,
# is returned as it is.
cdef Tensor to_host(Tensor tensor, const Place* place)


# indices.pxi: index arrays and masks as Tensors. `name` and `axes` are for messages.

# int32 or int64 of `ndim` axes on the device of the call; the last of two axes is contiguous. Lists and host arrays are
# copied to the device. A device array on the host (place is NULL) is a DeviceError.
cdef Tensor index_tensor(object array, str name, int ndim, str axes, const Place* place)

# The same array where the caller has it: on the host or on the device of the call.
cdef Tensor given_indices(object array, str name, int ndim, str axes, const Place* place)

# A view of an array; None for lists and for dtypes that a Tensor cannot have.
cdef Tensor viewed(object array, str name)

# A flat mask of bool, on the host or on the device of the call.
cdef Tensor flat_mask(object array, const Place* place)


# numbers.pxi: options and per-head numbers as C values and Tensors. `name` is that of the argument, for messages.

# One number for each head, on the device of the call: any float dtype and stride on the host, contiguous float32 on
# CUDA.
cdef Tensor head_numbers(object array, str name, int64_t num_heads, const Place* place)

# head_numbers() that also takes a single number, or an array of one; the result for an array of one on a device is a
# view with a stride of 0. Returns None if all scales are the number 1. Numbers on the host must be finite and, with
# `divides`, not 0; numbers on a device are not checked.
cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place)

# The two steps of scale_numbers(): scales where the caller has them, and their copy on the device of the call.
cdef Tensor checked_scales(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place)
cdef Tensor numbers_to_device(Tensor tensor, str name, const Place* place)

# The stride of scales in elements: 1, or 0 for one number that all heads share.
cdef int scale_stride(Tensor scales) noexcept

# Scales to divide by: a single number is written to `divisor`, and None is returned. Otherwise `divisor` is 1.
cdef Tensor divisors(object scale, str name, int64_t num_kv_heads, const Place* place, float* divisor)

cdef double finite_number(object number, str name) except? -1
# A cap of scores: 0 for none, or a number by which a score can be divided.
cdef double read_softcap(object softcap) except? -1
cdef bint read_flag(object value, str name) except -1
# An integer from `least` to the largest int32.
cdef int64_t read_size(object value, str name, int64_t least) except -1
# The index of one of the names in `options`.
cdef int read_choice(object value, str name, tuple options) except -1


# formats.pxi: caches with their formats.

# Keys or values of a cache: codes and, if the format computes scales, the plane that stores them.
cdef class StoredCache:
    cdef Tensor codes    # [num_blocks, block_size, num_kv_heads, dim / codes_per_byte]
    cdef Tensor plane    # [num_blocks, block_size, num_kv_heads, groups], or None; of one group also without that axis
    cdef Format format
    cdef int64_t dim     # numbers of a row

# The checked cache of the arguments `{label}_cache`, `{label}_scale`: on the device of the call, contiguous rows, a
# known pair of dtypes, and a plane of the cache's shape.
cdef StoredCache stored_cache(object codes, object scale, str label, const Place* place)

# A cache of checked float32, float16 or bfloat16.
cdef StoredCache plain_cache(Tensor numbers)

# The argument that holds the given factor of a cache, a float or one number for each head: `scale`, or `global_scale`
# for nvfp4. None if the format computes its scales.
cdef object given_factor(StoredCache cache, object scale, object global_scale, str label)

# ShapeError unless both have the same blocks, block_size and heads.
cdef int check_stored(StoredCache keys, StoredCache values) except -1

# The format of a name; sets `four_over_six` to True for "nvfp4_4over6". UnsupportedOption, with the list and `others`,
# for any other name.
cdef Format named_format(object name, bint* four_over_six, tuple others=*) except *

# Numbers that share a stored scale; 0 for a row.
cdef int64_t group_of(Format format) noexcept

# Dtypes of the codes, and of the stored scales: -1 if a format stores none.
cdef int code_dtype(Format format) noexcept
cdef int scale_dtype(Format format) noexcept

# Codes of two numbers in a byte.
cdef inline bint is_packed(Format format) noexcept:
    return format == Format.I4Token or format == Format.FP4Block16 or format == Format.NVFP4

# Formats without stored scales.
cdef inline bint is_cast(Format format) noexcept:
    return format == Format.E4M3 or format == Format.E5M2

# The arguments of a write: checks that the caches have the format of the argument of that name, if there is one, and
# returns True for "nvfp4_4over6".
cdef bint read_format(object format, StoredCache keys, StoredCache values) except -1

# Checks of written caches: writable, and no byte in two planes, in an input, or twice in one plane.
cdef int check_written(StoredCache keys, StoredCache values) except -1
cdef int check_apart_from(StoredCache keys, StoredCache values, Tensor read, str name) except -1


# A cache without codes: float32, float16 or bfloat16.
cdef inline bint is_plain(StoredCache cache) noexcept:
    return cache.format == Format.Plain


cdef inline Cache native_cache(StoredCache stored) noexcept:
    cdef Cache cache = cache_array(stored.codes)
    cache.dim, cache.format = stored.dim, stored.format
    if stored.plane is not None:
        cache.scales.data = stored.plane.data
        cache.scales.block_stride, cache.scales.token_stride = stored.plane.strides_[0], stored.plane.strides_[1]
        cache.scales.head_stride = stored.plane.strides_[2]
    return cache


# selected.pxi: the blocks or tokens that key heads select, as paged_attention takes them.

cdef class Selected:
    cdef Tensor entries
    cdef Tensor counts     # None: lists end before their first negative entry
    cdef int64_t unit      # tokens of an entry
    cdef bint by_block
    cdef str name          # of the argument

    cdef void fill(self, Selection* selection) noexcept
    cdef bint is_on_host(self) noexcept
    # A copy of both arrays on the host.
    cdef Selected on_host(self, const Place* place)
    # On CUDA: copies lists on the host to the device. They are checked first, against the lengths if these are on the
    # host, else against the `room` tokens of a row of the block table.
    cdef int send(self, Tensor lens, int64_t room, const Place* place) except -1
    cdef int check(self, Tensor lens, int64_t room) except -1
    # UnsupportedOption if `out` shares memory with the lists.
    cdef int check_apart_from(self, Tensor out) except -1


# Returns None if nothing is selected.
cdef Selected read_selected(
    object blocks, object block_counts, object indices, object index_counts, int64_t num_sequences,
    int64_t num_kv_heads, int64_t block_size, const Place* place)


# tree.pxi: trees of new tokens: their bits and positions as Tensors.

cdef extern from "pagecore/ops/tree.hpp" namespace "pagecore" nogil:
    int64_t first_wrong_parent(const int64_t* parents, int64_t count)
    void write_tree(const int64_t* parents, int64_t count, int64_t words, uint64_t* rows, int32_t* depths)
    void write_chain(int64_t count, int64_t words, uint64_t* rows)


cdef class TreeMask:
    cdef Tensor bits       # int64 [T] or [T, words], contiguous
    cdef Tensor positions  # int32 or int64 [T], or None
    cdef int64_t words

    cdef int check_apart_from(self, Tensor out) except -1
    cdef bint is_on_host(self) noexcept
    # Copies the arrays to the device of the call.
    cdef int send(self, const Place* place) except -1
    # A copy of both arrays on the host.
    cdef TreeMask on_host(self, const Place* place)
    cdef Tree native(self) noexcept


# The arguments tree_mask and positions where the caller has them; None without a tree.
cdef TreeMask read_tree(
    object tree_mask, object positions, object mask, bint is_selected, int64_t num_tokens, const Place* place)


# windows.pxi: windows, chunks and sink tokens.

# Reads a window as keys before and after a query's own position, -1 for no bound. A window of W keys counts the query's
# own, so it is (W - 1, no bound).
cdef int read_window(object window, int64_t* left, int64_t* right) except -1
cdef int read_reach(object window, object chunk, int64_t* left, int64_t* right) except -1
cdef object chunk_of(int64_t left)
# The number of sink tokens of a window whose left side is `left`; 0 for None.
cdef int64_t read_sink_tokens(object sink_tokens, object chunk, int64_t left) except -1


# sealed.pxi: sealed blocks as arguments.

# Checked codes and scales of sealed blocks, and their arguments for the kernels.
cdef class Sealed:
    cdef Tensor key
    cdef Tensor value
    cdef Tensor key_scale
    cdef Tensor value_scale
    cdef Tensor table  # None outside of attention, as is `lens`
    cdef Tensor lens
    cdef SealedBlocks blocks

    # UnsupportedOption if a written array shares memory with any of them.
    cdef int check_apart_from(self, Tensor written) except -1

    # True if the table and the lengths are on the host.
    cdef bint is_on_host(self) noexcept

    # A copy with the table and the lengths on the host; waits for the stream.
    cdef Sealed on_host(self, const Place* place)

    # Copies the table and the lengths to the device of the call, after a check of lengths on the host.
    cdef int send(self, int64_t block_size, const Place* place) except -1


# Codes and scales next to plain caches of the newest tokens.
cdef Sealed sealed_planes(
    object key, object value, object key_scale, object value_scale, Tensor newest_key, Tensor newest_value,
    const Place* place)

# The argument `sealed` of attention; None for None.
cdef Sealed read_sealed(
    object sealed, Tensor newest_key, Tensor newest_value, int64_t num_sequences, int64_t num_rows, const Place* place)
