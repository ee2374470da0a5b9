// Launches of merge_parts: the unit that a thread merges at once, and the tokens of each launch.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

struct MergeLaunch {
  PcMergeParams params = {};
  Grid grid;
};

namespace internal {

inline uint64_t bits_of_rows(const TokenArray& rows) {
  uint64_t bits = address_of(rows.data);
  if (rows.num_tokens > 1) bits |= bits_of(rows.token_stride);
  if (rows.num_heads > 1) bits |= bits_of(rows.head_stride);
  return bits;
}

inline PcRows rows_from(TokenArray rows, int64_t token) {
  rows.data += token * rows.token_stride;
  return device_tokens(rows);
}

inline PcLse lse_from(const Lse& lse, int64_t token) {
  constexpr int64_t kSize = sizeof(float);
  return {address_of(lse.data + token * lse.token_stride), lse.token_stride / kSize, lse.head_stride / kSize};
}

}  // namespace internal

[[nodiscard]] inline std::vector<MergeLaunch> merge_launches(const MergeArgs& args) {
  const TokenArray& out = args.out;
  const int64_t size = size_of(out.type);
  const uint64_t bits =
      internal::bits_of_rows(args.out_a) | internal::bits_of_rows(args.out_b) | internal::bits_of_rows(out);
  int64_t unit = 16 / size;
  while (unit > 1 && (out.dim % unit != 0 || !allows(bits, unit * size))) unit /= 2;
  const int64_t units = out.dim / unit;
  const int shift = std::countr_zero(std::bit_ceil(bits_of(std::min<int64_t>(units, 32))));
  std::vector<MergeLaunch> launches;
  if (out.num_heads == 0) return launches;
  PC_EXPECTS(out.num_heads <= kMaxUnits >> shift && units <= kMaxUnits, ShapeError, "a token has ", out.num_heads,
             " heads of ", out.dim, "; on CUDA it must have fewer than ", kMaxUnits, " numbers");
  const int64_t tokens_at_most = (kMaxUnits >> shift) / out.num_heads;
  for (int64_t token = 0; token < out.num_tokens; token += tokens_at_most) {
    const int64_t rows = std::min(tokens_at_most, out.num_tokens - token) * out.num_heads;
    MergeLaunch& launch = launches.emplace_back();
    PcMergeParams& params = launch.params;
    params.out_a = internal::rows_from(args.out_a, token);
    params.out_b = internal::rows_from(args.out_b, token);
    params.out = internal::rows_from(out, token);
    params.lse_a = internal::lse_from(args.lse_a, token);
    params.lse_b = internal::lse_from(args.lse_b, token);
    params.lse = internal::lse_from(args.lse, token);
    params.num_heads = make_divisor(out.num_heads);
    params.num_rows = static_cast<pc_int32>(rows);
    params.unit = static_cast<pc_int32>(unit);
    params.units_per_row = static_cast<pc_int32>(units);
    params.lanes_shift = shift;
    launch.grid.x = ceil_div(rows << shift, kThreads);
  }
  return launches;
}

}  // namespace pagecore::cuda
