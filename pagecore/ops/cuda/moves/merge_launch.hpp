// Launches of merges: the unit that a thread merges at once, and the tokens of each launch.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_src/abi/merge.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

struct MergeLaunch {
  PcMaskedMergeParams params = {};
  Grid grid;
};

struct MergeManyLaunch {
  PcMergeManyParams params = {};
  Grid grid;
};

namespace internal {

inline uint64_t bits_of_rows(const TokenArray& rows) {
  uint64_t bits = address_of(rows.data);
  if (rows.num_tokens > 1) bits |= bits_of(rows.token_stride);
  if (rows.num_heads > 1) bits |= bits_of(rows.head_stride);
  return bits;
}

struct MergeUnits {
  int64_t unit;     // elements
  int64_t per_row;  // units of a head
  int lanes_shift;
};

// The longest unit that all addresses and strides allow; `bits` is their union.
inline MergeUnits units_of(const TokenArray& out, uint64_t bits) {
  const int64_t size = size_of(out.type);
  int64_t unit = 16 / size;
  while (unit > 1 && (out.dim % unit != 0 || !allows(bits, unit * size))) unit /= 2;
  const int64_t units = out.dim / unit;
  return {unit, units, std::countr_zero(std::bit_ceil(bits_of(std::min<int64_t>(units, 32))))};
}

inline PcRows rows_from(TokenArray rows, int64_t token) {
  rows.data += token * rows.token_stride;
  return device_tokens(rows);
}

inline PcLse lse_from(const Lse& lse, int64_t token) {
  constexpr int64_t kSize = sizeof(float);
  return {address_of(lse.data + token * lse.token_stride), lse.token_stride / kSize, lse.head_stride / kSize};
}

// Calls add(token, num_rows, units) for each launch, which merges the rows of some tokens from `token` on.
template <typename Add>
void for_each_launch(const TokenArray& out, uint64_t bits, Add&& add) {
  if (out.num_heads == 0) return;
  const MergeUnits units = units_of(out, bits);
  PC_EXPECTS(out.num_heads <= kMaxUnits >> units.lanes_shift && out.dim <= kMaxUnits, ShapeError, "a token has ",
             out.num_heads, " heads of ", out.dim, "; on CUDA it must have fewer than ", kMaxUnits, " numbers");
  const int64_t tokens_at_most = (kMaxUnits >> units.lanes_shift) / out.num_heads;
  for (int64_t token = 0; token < out.num_tokens; token += tokens_at_most) {
    add(token, std::min(tokens_at_most, out.num_tokens - token) * out.num_heads, units);
  }
}

}  // namespace internal

[[nodiscard]] inline std::vector<MergeLaunch> merge_launches(const MergeArgs& args) {
  const TokenArray& out = args.out;
  const uint64_t bits =
      internal::bits_of_rows(args.out_a) | internal::bits_of_rows(args.out_b) | internal::bits_of_rows(out);
  std::vector<MergeLaunch> launches;
  internal::for_each_launch(out, bits, [&](int64_t token, int64_t rows, const internal::MergeUnits& units) {
    MergeLaunch& launch = launches.emplace_back();
    PcMergeParams& params = launch.params.merge;
    params.out_a = internal::rows_from(args.out_a, token);
    params.out_b = internal::rows_from(args.out_b, token);
    params.out = internal::rows_from(out, token);
    params.lse_a = internal::lse_from(args.lse_a, token);
    params.lse_b = internal::lse_from(args.lse_b, token);
    params.lse = internal::lse_from(args.lse, token);
    params.num_heads = make_divisor(out.num_heads);
    params.num_rows = static_cast<pc_int32>(rows);
    params.unit = static_cast<pc_int32>(units.unit);
    params.units_per_row = static_cast<pc_int32>(units.per_row);
    params.lanes_shift = units.lanes_shift;
    if (args.mask != nullptr) launch.params.mask = address_of(args.mask + token * args.mask_stride);
    launch.params.mask_stride = args.mask_stride;
    launch.grid.x = ceil_div(rows << units.lanes_shift, kThreads);
  });
  return launches;
}

[[nodiscard]] inline std::vector<MergeManyLaunch> merge_many_launches(const MergeManyArgs& args) {
  const int64_t num_parts = args.parts.num_tokens;
  PC_EXPECTS(num_parts <= kMaxUnits, ShapeError, "outs has ", num_parts, " parts; on CUDA it must have at most ",
             kMaxUnits, ": merge them in several calls");
  const TokenArray& out = args.out;
  uint64_t bits = internal::bits_of_rows(args.parts) | internal::bits_of_rows(out);
  if (out.num_tokens > 1) bits |= bits_of(args.token_stride);
  std::vector<MergeManyLaunch> launches;
  internal::for_each_launch(out, bits, [&](int64_t token, int64_t rows, const internal::MergeUnits& units) {
    MergeManyLaunch& launch = launches.emplace_back();
    PcMergeManyParams& params = launch.params;
    params.parts = device_tokens(args.parts);
    params.parts.data += static_cast<pc_address>(token * args.token_stride);
    params.token_stride = args.token_stride / size_of(out.type);
    params.lses = internal::lse_from(args.lses, 0);
    params.lses.data += static_cast<pc_address>(token * args.lse_token_stride);
    params.lse_token_stride = args.lse_token_stride / static_cast<int64_t>(sizeof(float));
    params.out = internal::rows_from(out, token);
    params.lse = internal::lse_from(args.lse, token);
    if (args.cu_parts.data != nullptr) {
      params.cu_parts = device_indices(args.cu_parts);
      params.cu_parts.data += static_cast<pc_address>(token * args.cu_parts.stride);
    }
    params.num_parts = static_cast<pc_int32>(num_parts);
    params.num_heads = make_divisor(out.num_heads);
    params.num_rows = static_cast<pc_int32>(rows);
    params.unit = static_cast<pc_int32>(units.unit);
    params.units_per_row = static_cast<pc_int32>(units.per_row);
    params.lanes_shift = units.lanes_shift;
    launch.grid.x = ceil_div(rows << units.lanes_shift, kThreads);
  });
  return launches;
}

}  // namespace pagecore::cuda
