// The queries of a pass of latent attention, as the kernels multiply them.
//
//   pairs of bfloat16    [width / 2, columns]            instruction sets that multiply tiles of pairs
//   quads of pairs       [width / 8, columns / 4, 4, 4]  see latent_pairs.hpp
//   floats               [width, columns]
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_pairs.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE void load_floats(const TokenArray& part, int64_t token, int64_t head, float* to) {
  const char* from = part.data + token * part.token_stride + head * part.head_stride;
  with_float(part.type, [&]<Float T>() {
    for_each_vector<T>(from, part.dim, [&](int64_t d, Vec v, int64_t count) {
      float numbers[kLanes];
      store(numbers, v);
      __builtin_memcpy(to + d, numbers, static_cast<size_t>(4 * count));
    });
  });
}

PC_FORCE_INLINE void load_halves(const TokenArray& part, int64_t token, int64_t head, uint16_t* to) {
  __builtin_memcpy(to, part.data + token * part.token_stride + head * part.head_stride,
                   static_cast<size_t>(2 * part.dim));
}

// The queries of a pass: latent and rope of a (query, head) pair are a row, with queries outermost.
struct LatentQueries {
  const TokenArray& latent;
  const TokenArray& rope;
  int64_t first;  // token of the first query
  int64_t count;
  int64_t latent_width;
  int64_t width;
  int64_t columns;  // rows past the last one become zeros
};

// Calls put(row, numbers [width]) for each row. `numbers` is scratch for a row.
template <typename Number, typename Load, typename Put>
PC_FORCE_INLINE void for_each_query(const LatentQueries& q, Number* numbers, Load&& load_part, Put&& put) {
  const int64_t heads = q.latent.num_heads;
  __builtin_memset(numbers, 0, static_cast<size_t>(q.width) * sizeof(Number));
  for (int64_t row = 0; row < q.columns; ++row) {
    const int64_t query = row / heads, head = row % heads;
    if (query < q.count) {
      load_part(q.latent, q.first + query, head, numbers);
      load_part(q.rope, q.first + query, head, numbers + q.latent_width);
    } else if (query == q.count && head == 0) {
      __builtin_memset(numbers, 0, static_cast<size_t>(q.width) * sizeof(Number));
    }
    put(row, numbers);
  }
}

inline void load_queries(const LatentQueries& q, float* panel, float* numbers) {
  for_each_query(q, numbers, load_floats, [&](int64_t row, const float* from) {
    for (int64_t d = 0; d < q.width; ++d) panel[d * q.columns + row] = from[d];
  });
}

inline void load_query_pairs(const LatentQueries& q, float* panel, uint16_t* numbers) {
  for_each_query(q, numbers, load_halves, [&](int64_t row, const uint16_t* from) {
    if constexpr (kHasQuads) {
      pack_quads(from, q.width, q.columns, row, panel);
    } else {
      char* to = reinterpret_cast<char*>(panel + row);
      for (int64_t d = 0; d < q.width; d += 2, to += 4 * q.columns) __builtin_memcpy(to, from + d, 4);
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
