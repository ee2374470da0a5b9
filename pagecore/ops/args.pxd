# Arguments of the kernels, and the functions that make them from Tensors: the only ones, for host and CUDA alike.
#
# The functions check nothing: the caller has checked ranks, dtypes and contiguous last axes. They are inline, because a
# call makes a dozen arguments. None becomes an absent argument.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.arrays.dtypes.codes cimport DType, INT64
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector


cdef extern from "pagecore/ops/format.hpp" namespace "pagecore" nogil:
    enum class Format(int32_t):
        Plain
        E4M3
        E5M2
        E4M3Token
        I8Token
        I4Token
        FP4Block16
        NVFP4
        MXFP8


cdef extern from "pagecore/ops/args.hpp" namespace "pagecore" nogil:
    cdef cppclass Indices:
        const char* data
        int64_t size
        int64_t stride
        cbool wide
        int64_t at(int64_t i)

    cdef cppclass Table:
        const char* data
        int64_t num_rows
        int64_t width
        int64_t row_stride
        cbool wide

    cdef cppclass ScalePlane:
        char* data
        int64_t block_stride
        int64_t token_stride
        int64_t head_stride

    cdef cppclass Cache:
        char* data
        DType type
        int64_t num_blocks
        int64_t block_size
        int64_t num_heads
        int64_t dim
        int64_t block_stride
        int64_t token_stride
        int64_t head_stride
        Format format
        ScalePlane scales

    cdef cppclass TokenArray:
        char* data
        DType type
        int64_t num_tokens
        int64_t num_heads
        int64_t dim
        int64_t token_stride
        int64_t head_stride

    cdef cppclass PerHead:
        const char* data
        DType type
        int64_t stride

    cdef cppclass Lse:
        char* data
        int64_t num_tokens
        int64_t token_stride
        int64_t head_stride

    cdef cppclass BlockArray:
        char* data
        int32_t dtype
        int32_t ndim
        int64_t num_blocks
        int64_t block_stride
        int64_t itemsize
        int64_t shape[8]
        int64_t strides[8]

    cdef cppclass WriteArgs:
        TokenArray key
        TokenArray value
        Cache key_cache
        Cache value_cache
        Indices slots
        PerHead key_scale
        PerHead value_scale
        cbool four_over_six

    cdef cppclass MergeArgs:
        TokenArray out_a
        TokenArray out_b
        TokenArray out
        Lse lse_a
        Lse lse_b
        Lse lse
        const char* mask
        int64_t mask_stride

    cdef cppclass MergeManyArgs:
        TokenArray parts
        Lse lses
        int64_t token_stride
        int64_t lse_token_stride
        Indices cu_parts
        TokenArray out
        Lse lse


cdef inline TokenArray token_array(Tensor tensor) noexcept:
    cdef TokenArray tokens
    tokens.data = tensor.data
    tokens.type = <DType>tensor.dtype_code
    tokens.num_tokens, tokens.num_heads, tokens.dim = tensor.shape_[0], tensor.shape_[1], tensor.shape_[2]
    tokens.token_stride, tokens.head_stride = tensor.strides_[0], tensor.strides_[1]
    return tokens


cdef inline Cache cache_array(Tensor tensor) noexcept:
    cdef Cache cache
    cache.data = tensor.data
    cache.type = <DType>tensor.dtype_code
    cache.num_blocks, cache.block_size = tensor.shape_[0], tensor.shape_[1]
    cache.num_heads, cache.dim = tensor.shape_[2], tensor.shape_[3]
    cache.block_stride, cache.token_stride = tensor.strides_[0], tensor.strides_[1]
    cache.head_stride = tensor.strides_[2]
    return cache


cdef inline Indices index_array(Tensor tensor) noexcept:
    cdef Indices indices
    if tensor is not None:
        indices.data = tensor.data
        indices.size = tensor.shape_[0]
        indices.stride = tensor.strides_[0]
        indices.wide = tensor.dtype_code == INT64
    return indices


# Column 0 (sources) or 1 (targets) of pairs, [n, 2].
cdef inline Indices pair_column(Tensor pairs, int column) noexcept:
    cdef Indices indices = index_array(pairs)
    indices.data += column * pairs.strides_[1]
    return indices


cdef inline Table table_array(Tensor tensor) noexcept:
    cdef Table table
    table.data = tensor.data
    table.num_rows, table.width = tensor.shape_[0], tensor.shape_[1]
    table.row_stride = tensor.strides_[0]
    table.wide = tensor.dtype_code == INT64
    return table


cdef inline PerHead per_head(Tensor tensor) noexcept:
    cdef PerHead values
    if tensor is not None:
        values.data = tensor.data
        values.type = <DType>tensor.dtype_code
        values.stride = tensor.strides_[0]
    return values


cdef inline Lse lse_array(Tensor tensor) noexcept:
    cdef Lse lse
    if tensor is not None:
        lse.data = tensor.data
        lse.num_tokens = tensor.shape_[0]
        lse.token_stride, lse.head_stride = tensor.strides_[0], tensor.strides_[1]
    return lse


# Parts of attention and their lse, [token, part, head, dim] or, with `cu_parts`, [part, head, dim].
cdef inline MergeManyArgs merge_many_args(
        Tensor parts, Tensor lses, Tensor cu_parts, Tensor out, Tensor lse) noexcept:
    cdef MergeManyArgs args
    cdef int first = 0 if cu_parts is not None else 1
    args.parts.data = parts.data
    args.parts.type = <DType>parts.dtype_code
    args.parts.num_tokens, args.parts.num_heads = parts.shape_[first], parts.shape_[first + 1]
    args.parts.dim = parts.shape_[first + 2]
    args.parts.token_stride, args.parts.head_stride = parts.strides_[first], parts.strides_[first + 1]
    args.lses.data = lses.data
    args.lses.num_tokens = lses.shape_[first]
    args.lses.token_stride, args.lses.head_stride = lses.strides_[first], lses.strides_[first + 1]
    if first:
        args.token_stride, args.lse_token_stride = parts.strides_[0], lses.strides_[0]
    else:
        args.token_stride = args.lse_token_stride = 0
        args.cu_parts = index_array(cu_parts)
    args.out = token_array(out)
    args.lse = lse_array(lse)
    return args


cdef inline void fill_block_array(BlockArray* array, Tensor tensor) noexcept:
    cdef int i
    array.data, array.dtype = tensor.data, tensor.dtype_code
    array.num_blocks, array.block_stride = tensor.shape_[0], tensor.strides_[0]
    array.itemsize, array.ndim = tensor.itemsize, tensor.ndim - 1
    for i in range(array.ndim):
        array.shape[i], array.strides[i] = tensor.shape_[i + 1], tensor.strides_[i + 1]


# Fills an empty vector in place: a vector that is returned would be copied.
cdef inline int fill_block_arrays(vector[BlockArray]& arrays, list tensors) except -1:
    cdef Py_ssize_t i
    arrays.resize(len(tensors))
    for i in range(len(tensors)):
        fill_block_array(&arrays[i], <Tensor>tensors[i])
    return 0
