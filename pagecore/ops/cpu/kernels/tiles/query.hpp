// Loading of query rows into scratch memory.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE const char* query_row(const AttentionArgs& args, int64_t token, int64_t head) {
  return args.query.data + token * args.query.token_stride + head * args.query.head_stride;
}

// Copies a bfloat16 row to target [stride], padded with zeros.
PC_FORCE_INLINE void copy_query(const AttentionArgs& args, int64_t token, int64_t head, uint16_t* target,
                                int64_t stride) {
  const int64_t dim = args.query.dim;
  __builtin_memcpy(target, query_row(args, token, head), static_cast<size_t>(2 * dim));
  for (int64_t d = dim; d < stride; ++d) target[d] = 0;
}

// Writes a row times `factor` to target [stride] in float32, padded with zeros.
PC_FORCE_INLINE void scale_query(const AttentionArgs& args, int64_t token, int64_t head, double factor, float* target,
                                 int64_t stride) {
  const int64_t dim = args.query.dim;
  with_float(args.query.type, [&]<Float T>() {
    for_each_vector<T>(query_row(args, token, head), dim, [&](int64_t d, Vec v, int64_t) { store(target + d, v); });
  });
  for (int64_t d = 0; d < dim; ++d) target[d] = static_cast<float>(static_cast<double>(target[d]) * factor);
  for (int64_t d = dim; d < stride; ++d) target[d] = 0.0f;
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
