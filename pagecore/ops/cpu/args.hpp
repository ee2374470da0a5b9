// What the host kernels are given: addresses, strides in bytes, options. No ownership, no behaviour.
//
// These structs cross from the portable code to the code of one instruction set, so nothing here may be emitted out of
// line: the few functions are forced inline.
#pragma once

#include <cstdint>

#include "cuda_src/abi.h"

#define PC_FORCE_INLINE [[gnu::always_inline]] inline

namespace pagecore::cpu {

// The numbers of arrays/dtype.hpp, for those dtypes that kernels read and write.
enum class Float : int32_t { F32 = 0, F16 = 1, BF16 = 2 };

PC_FORCE_INLINE int64_t size_of(Float type) { return type == Float::F32 ? 4 : 2; }

// A 1-D array of int32 or int64, any stride.
struct Indices {
  const char* data = nullptr;
  int64_t size = 0;
  int64_t stride = 0;
  bool wide = false;

  // One load, which the compiler does not repeat: another thread of the caller may change the array meanwhile, and the
  // number that was checked must be the one that is used.
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
  bool wide = false;

  PC_FORCE_INLINE Indices row(int64_t i) const { return {data + i * row_stride, width, wide ? 8 : 4, wide}; }
};

// One plane of a cache, logically [block, token, head, dim]; dim is contiguous.
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
};

// Query, key, value or output, logically [token, head, dim]; dim is contiguous.
struct Rows {
  char* data = nullptr;
  Float type = Float::F32;
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// One number for each head, any stride; absent when data is null.
struct PerHead {
  const char* data = nullptr;
  Float type = Float::F32;
  int64_t stride = 0;
};

// float32 [token, head], any strides; absent when data is null.
struct Lse {
  char* data = nullptr;
  int64_t num_tokens = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  PC_FORCE_INLINE float& at(int64_t token, int64_t head) const {
    return *reinterpret_cast<float*>(data + token * token_stride + head * head_stride);
  }
};

struct AttentionArgs {
  Rows query;
  Cache key;
  Cache value;
  Table table;
  Indices seq_lens;
  Indices rows;           // absent: sequence i is row i of the table
  Indices cu_query_lens;  // absent: one query for each sequence
  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  bool causal = true;
  int64_t window_left = -1;  // keys before a query's own position; -1: unbounded
  int64_t window_right = -1;
  PerHead sinks;
  PerHead alibi_slopes;
  PerHead key_scale;
  PerHead value_scale;
  const uint8_t* mask = nullptr;  // flat [query_len, seq_len] of every sequence in order
  int64_t mask_size = -1;         // -1: no mask
  Rows out;
  Lse lse;
};

// A plan made earlier, and what it was made for.
struct PlanView {
  const PcWorkItem* items = nullptr;
  int64_t num_items = 0;
  int64_t num_partial_rows = 0;
  const int32_t* cu_query_lens = nullptr;  // [num_sequences + 1]
  const int32_t* seq_lens = nullptr;       // [num_sequences]
  int64_t num_sequences = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  bool causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
  bool batch_invariant = false;
};

struct WriteArgs {
  Rows key;
  Rows value;
  Cache key_cache;
  Cache value_cache;
  Indices slots;
  PerHead key_scale;
  PerHead value_scale;
};

struct MergeArgs {
  Rows out_a;
  Rows out_b;
  Rows out;
  Lse lse_a;
  Lse lse_b;
  Lse lse;
};

// One array whose first axis counts blocks (or tokens, where sequences lie packed): the other axes are walked as they
// are.
struct BlockArray {
  char* data = nullptr;
  int32_t dtype = 0;  // in the dtype table, which starts with Float's
  int32_t ndim = 0;   // axes after the first
  int64_t num_blocks = 0;
  int64_t block_stride = 0;
  int64_t itemsize = 1;
  int64_t shape[8] = {};
  int64_t strides[8] = {};
};

}  // namespace pagecore::cpu
