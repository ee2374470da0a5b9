// Arguments of the kernels, on the host and on CUDA: addresses, shapes, strides in bytes. No ownership, no behaviour.
//
// These structs pass between portable code and code compiled for one instruction set. A function that was emitted out
// of line could be linked in a version that the machine cannot run, so every function here is forced inline.
#pragma once

#include <cstdint>

#include "pagecore/arrays/dtypes/dtype.hpp"
#include "pagecore/ops/format.hpp"

#define PC_FORCE_INLINE [[gnu::always_inline]] inline

namespace pagecore {

// The dtype of numbers that kernels compute with, F32, F16 or BF16, or that of the codes of a cache.
using Float = DType;

PC_FORCE_INLINE int64_t size_of(Float type) { return type == Float::F32 ? 4 : type <= Float::BF16 ? 2 : 1; }

// A 1-D array of int32 or int64 with any stride; absent when data is null.
struct Indices {
  const char* data = nullptr;
  int64_t size = 0;
  int64_t stride = 0;
  bool wide = false;  // int64

  // Another thread may change the array meanwhile, and the number that was checked must be the one that is used. An
  // atomic load keeps the compiler from reading the number twice.
  PC_FORCE_INLINE int64_t at(int64_t i) const {
    const char* address = data + i * stride;
    return wide ? __atomic_load_n(reinterpret_cast<const int64_t*>(address), __ATOMIC_RELAXED)
                : __atomic_load_n(reinterpret_cast<const int32_t*>(address), __ATOMIC_RELAXED);
  }
};

// A block table: rows of int32 or int64, each contiguous.
struct Table {
  const char* data = nullptr;
  int64_t num_rows = 0;
  int64_t width = 0;
  int64_t row_stride = 0;
  bool wide = false;  // int64

  PC_FORCE_INLINE Indices row(int64_t i) const { return {data + i * row_stride, width, wide ? 8 : 4, wide}; }
};

// Stored scales of a quantised cache, logically [block, token, head, group]; the groups of a row are contiguous. Absent
// when data is null.
struct ScalePlane {
  char* data = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// Keys or values of a cache, logically [block, token, head, dim]; dim is contiguous. `dim` counts numbers; `type` is
// the dtype of the stored codes, of which a byte can hold two (row_bytes).
struct Cache {
  char* data = nullptr;
  Float type = Float::F32;
  int64_t num_blocks = 0;
  int64_t block_size = 1;
  int64_t num_heads = 0;
  int64_t dim = 0;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  Format format = Format::Plain;
  ScalePlane scales{};
};

// Bytes of the codes of `dim` numbers of a cache.
PC_FORCE_INLINE int64_t row_bytes(const Cache& cache) {
  switch (cache.format) {
    case Format::Plain: return cache.dim * size_of(cache.type);
    case Format::I4Token:
    case Format::FP4Block16:
    case Format::NVFP4: return cache.dim / 2;
    default: return cache.dim;
  }
}

// Bytes of the stored scales of a row.
PC_FORCE_INLINE int64_t scale_bytes(const Cache& cache) {
  switch (cache.format) {
    case Format::E4M3Token:
    case Format::I8Token:
    case Format::I4Token: return 4;
    case Format::FP4Block16:
    case Format::NVFP4: return cache.dim / 16;
    case Format::MXFP8: return cache.dim / 32;
    default: return 0;
  }
}

// Query, key, value or output, logically [token, head, dim]; dim is contiguous.
struct TokenArray {
  char* data = nullptr;
  Float type = Float::F32;
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// One number for each head, with any stride; absent when data is null.
struct PerHead {
  const char* data = nullptr;
  Float type = Float::F32;
  int64_t stride = 0;
};

// float32 [token, head] with any strides; absent when data is null.
struct Lse {
  char* data = nullptr;
  int64_t num_tokens = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  PC_FORCE_INLINE float& at(int64_t token, int64_t head) const {
    return *reinterpret_cast<float*>(data + token * token_stride + head * head_stride);
  }
};

// An array of any dtype whose first axis counts blocks, or tokens when sequences are packed.
struct BlockArray {
  char* data = nullptr;
  int32_t dtype = 0;  // DType
  int32_t ndim = 0;   // axes after the first
  int64_t num_blocks = 0;
  int64_t block_stride = 0;
  int64_t itemsize = 1;
  int64_t shape[8] = {};
  int64_t strides[8] = {};
};

struct WriteArgs {
  TokenArray key;
  TokenArray value;
  Cache key_cache;
  Cache value_cache;
  Indices slots;
  PerHead key_scale;  // given factors; absent if all are 1
  PerHead value_scale;
  bool four_over_six = false;  // how scales of Format::NVFP4 are computed
};

struct MergeArgs {
  TokenArray out_a;
  TokenArray out_b;
  TokenArray out;
  Lse lse_a;
  Lse lse_b;
  Lse lse;
  const char* mask = nullptr;  // one byte for each token: 0 if part b is ignored; absent when null
  int64_t mask_stride = 0;
};

// Any number of parts for each token.
struct MergeManyArgs {
  TokenArray parts;          // [part, head, dim]: those of the first token, or with cu_parts those of all tokens
  Lse lses;                  // [part, head]
  int64_t token_stride = 0;  // from the parts of a token to those of the next, in bytes; 0 with cu_parts
  int64_t lse_token_stride = 0;
  Indices cu_parts;  // [num_tokens + 1]: the parts of token t are cu_parts[t] to cu_parts[t + 1] - 1
  TokenArray out;
  Lse lse;
};

}  // namespace pagecore
