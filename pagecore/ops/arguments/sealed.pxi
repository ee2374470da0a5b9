"""Checks of sealed blocks: their codes, scales and table, against the plain caches of the newest tokens."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT32, LAST_FLOAT, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport index_array, table_array
from pagecore.ops.arguments._overlap cimport check_apart
from pagecore.ops.sealed_plane cimport SealedPlane

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown
from pagecore.ops.arguments.sealed_blocks import SealedBlocks as _SealedBlocks

cdef enum:
    LANES = 16  # channels of a vector: dims and groups of channels are multiples


cdef class Sealed:
    cdef int check_apart_from(self, Tensor written) except -1:
        check_apart(written, "out", self.key, "sealed key")
        check_apart(written, "out", self.value, "sealed value")
        check_apart(written, "out", self.key_scale, "sealed key_scale")
        check_apart(written, "out", self.value_scale, "sealed value_scale")
        check_apart(written, "out", self.table, "sealed block_table")
        return check_apart(written, "out", self.lens, "sealed lens")

    cdef bint is_on_host(self) noexcept:
        return are_on_host((self.table, self.lens))

    cdef Sealed on_host(self, const Place* place):
        cdef Sealed copy = Sealed.__new__(Sealed)
        copy.key, copy.value, copy.key_scale, copy.value_scale = self.key, self.value, self.key_scale, self.value_scale
        copy.blocks = self.blocks
        set_table(copy, to_host(self.table, place), to_host(self.lens, place))
        return copy

    cdef int send(self, int64_t block_size, const Place* place) except -1:
        if self.lens.device_type == CPU:
            check_sealed_lens(self, block_size)
        set_table(
            self, to_device(self.table, "sealed block_table", place), to_device(self.lens, "sealed lens", place))
        return 0


cdef void set_table(Sealed sealed, Tensor table, Tensor lens) noexcept:
    sealed.table, sealed.lens = table, lens
    sealed.blocks.table, sealed.blocks.lens = table_array(table), index_array(lens)


cdef int check_sealed_lens(Sealed sealed, int64_t block_size) except -1:
    """Raise ShapeError for lengths on the host that are not whole blocks of the sealed table."""
    cdef int64_t i, length, room = sealed.table.shape_[1] if sealed.blocks.num_blocks > 0 else 0
    for i in range(sealed.blocks.lens.size):
        length = sealed.blocks.lens.at(i)
        if length < 0 or length % block_size != 0 or length // block_size > room:
            raise ShapeError(
                f"sealed lens[{i}] is {length}; it must be a multiple of the block size {block_size}, and at most "
                f"{room * block_size}, what a row of the sealed block table holds"
            )
    return 0


cdef Sealed sealed_planes(
        object key, object value, object key_scale, object value_scale, Tensor newest_key, Tensor newest_value,
        const Place* place):
    cdef Sealed sealed = Sealed.__new__(Sealed)
    check_newest(newest_key, "key")
    check_newest(newest_value, "value")
    sealed.key = sealed_words_of(key, "sealed key", "[num_blocks, Hkv, block_size * bits / 32, D]", place)
    sealed.value = sealed_words_of(value, "sealed value", "[num_blocks, block_size, Hkv, Dv * bits / 32]", place)
    sealed.key_scale = scales_of(key_scale, "sealed key_scale", "[num_blocks, Hkv, groups, 2, D]", place)
    sealed.value_scale = scales_of(value_scale, "sealed value_scale", "[num_blocks, block_size, Hkv, groups, 2]", place)
    check_last_axis(sealed.key_scale, "sealed key_scale")
    fill_keys(sealed, newest_key)
    fill_values(sealed, newest_value)
    check_length(sealed.value, "sealed value", 0, sealed.key.shape_[0], "the blocks of the sealed key")
    sealed.blocks.num_blocks = sealed.key.shape_[0]
    return sealed


cdef Sealed read_sealed(
        object sealed, Tensor newest_key, Tensor newest_value, int64_t num_sequences, int64_t num_rows,
        const Place* place):
    if sealed is None:
        return None
    if not isinstance(sealed, _SealedBlocks):
        raise UnsupportedOption(f"sealed is {shown(sealed)}; pass a SealedBlocks")
    if sealed.block_table is None or sealed.lens is None:
        raise UnsupportedOption("sealed has no block_table or no lens; attention needs both")
    cdef Sealed read = sealed_planes(
        sealed.key, sealed.value, sealed.key_scale, sealed.value_scale, newest_key, newest_value, place)
    cdef Tensor table = given_indices(
        sealed.block_table, "sealed block_table", 2, "[num_sequences, max_blocks]", place)
    check_length(table, "sealed block_table", 0, num_rows, "the rows of block_table")
    cdef Tensor lens = given_indices(sealed.lens, "sealed lens", 1, "[num_sequences]", place)
    check_length(lens, "sealed lens", 0, num_sequences, "one for each of seq_lens")
    set_table(read, table, lens)
    return read


cdef int check_newest(Tensor newest, str label) except -1:
    """Raise an error unless a cache of the newest tokens has a shape whose blocks can be sealed."""
    if newest.dtype_code > LAST_FLOAT:
        raise UnsupportedDtype(
            f"{label}_cache is {newest.dtype}; next to sealed blocks it holds float32, float16 or bfloat16")
    if newest.shape_[3] % LANES != 0:
        raise ShapeError(
            f"{label}_cache has shape {newest.shape} and so a head_dim of {newest.shape_[3]}; sealed blocks need a "
            f"multiple of {LANES}"
        )
    return 0


cdef Tensor sealed_words_of(object array, str name, str axes, const Place* place):
    cdef Tensor words = any_tensor(array, name)
    if words.dtype_code != INT32:
        raise UnsupportedDtype(f"{name} is {words.dtype}; the codes of sealed blocks are words of int32")
    check_rank(words, name, 4, axes)
    check_last_axis(words, name)
    check_aligned(words, name)
    check_place(words, name, place)
    return words


cdef Tensor scales_of(object array, str name, str axes, const Place* place):
    cdef Tensor scales = float_array(array, name)
    check_rank(scales, name, 5, axes)
    check_aligned(scales, name)
    check_place(scales, name, place)
    return scales


cdef int64_t bits_of(Tensor words, str name, int axis, int64_t count, str counted) except -1:
    """Return the bits of a code, of which `count` fill the axis of words."""
    cdef int64_t bits
    for bits in (2, 4):
        if words.shape_[axis] > 0 and words.shape_[axis] * 32 == count * bits:
            return bits
    raise ShapeError(
        f"{name} has shape {words.shape}; axis {axis} must have the words of {count} {counted}: {count / 16:g} for "
        f"codes of 2 bits, {count / 8:g} for 4 bits"
    )


cdef int64_t sealed_group_of(Tensor scales, str name, int axis, int64_t count, int64_t unit) except -1:
    """Return the numbers of a group, of which `axis` counts those of `count` numbers."""
    cdef int64_t groups = scales.shape_[axis], pair = scales.shape_[axis + 1]
    if groups == 0 or count % groups != 0 or count // groups % unit != 0 or pair != 2:
        raise ShapeError(
            f"{name} has shape {scales.shape}; axis {axis} must divide {count} into groups"
            f"{f' of a multiple of {unit}' if unit > 1 else ''}, and axis {axis + 1} have length 2"
        )
    return count // groups


cdef int fill_keys(Sealed sealed, Tensor newest) except -1:
    cdef Tensor words = sealed.key, scales = sealed.key_scale
    cdef int64_t block_size = newest.shape_[1], heads = newest.shape_[2], dim = newest.shape_[3]
    cdef SealedPlane* plane = &sealed.blocks.key
    check_length(words, "sealed key", 1, heads, "the heads of key_cache")
    check_length(words, "sealed key", 3, dim, "the head_dim of key_cache")
    check_length(scales, "sealed key_scale", 0, words.shape_[0], "the blocks of the sealed key")
    check_length(scales, "sealed key_scale", 1, heads, "the heads of key_cache")
    check_length(scales, "sealed key_scale", 4, dim, "the head_dim of key_cache")
    plane.bits = bits_of(words, "sealed key", 2, block_size, "tokens of a block")
    plane.group = sealed_group_of(scales, "sealed key_scale", 2, block_size, 1)
    fill_plane(plane, words, scales)
    plane.head_stride, plane.row_stride = words.strides_[1], words.strides_[2]
    plane.scales_head_stride, plane.scales_row_stride = scales.strides_[1], scales.strides_[2]
    plane.least_stride = scales.strides_[3]
    return 0


cdef int fill_values(Sealed sealed, Tensor newest) except -1:
    cdef Tensor words = sealed.value, scales = sealed.value_scale
    cdef int64_t block_size = newest.shape_[1], heads = newest.shape_[2], dim = newest.shape_[3]
    cdef SealedPlane* plane = &sealed.blocks.value
    check_length(words, "sealed value", 1, block_size, "the block_size of value_cache")
    check_length(words, "sealed value", 2, heads, "the heads of value_cache")
    check_length(scales, "sealed value_scale", 0, words.shape_[0], "the blocks of the sealed value")
    check_length(scales, "sealed value_scale", 1, block_size, "the block_size of value_cache")
    check_length(scales, "sealed value_scale", 2, heads, "the heads of value_cache")
    plane.bits = bits_of(words, "sealed value", 3, dim, "channels")
    plane.group = sealed_group_of(scales, "sealed value_scale", 3, dim, LANES)
    fill_plane(plane, words, scales)
    plane.row_stride, plane.head_stride = words.strides_[1], words.strides_[2]
    plane.scales_row_stride, plane.scales_head_stride = scales.strides_[1], scales.strides_[2]
    plane.group_stride, plane.least_stride = scales.strides_[3], scales.strides_[4]
    return 0


cdef void fill_plane(SealedPlane* plane, Tensor words, Tensor scales) noexcept:
    plane.words, plane.scales = words.data, scales.data
    plane.scale_type = <DType>scales.dtype_code
    plane.block_stride, plane.scales_block_stride = words.strides_[0], scales.strides_[0]
