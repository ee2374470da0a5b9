// Launches of write_codes for a slot-mapped write into quantised caches.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_src/abi/formats.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/cuda/moves/write_launch.hpp"

namespace pagecore::cuda {

struct CodeLaunch {
  PcCodeParams params = {};
  Float from = Float::F32;
  Grid grid;
};

namespace internal {

// Return true if 8 elements of a row, and their codes, can be moved at once.
inline bool moves_vectors(const TokenArray& rows, const Cache& cache) {
  uint64_t from = address_of(rows.data) | bits_of(rows.token_stride) | bits_of(rows.head_stride);
  uint64_t to =
      address_of(cache.data) | bits_of(cache.block_stride) | bits_of(cache.token_stride) | bits_of(cache.head_stride);
  const int64_t bytes = row_bytes(cache) * 8 / rows.dim;
  return rows.dim % 8 == 0 && allows(from, 16) && allows(to, bytes);
}

inline PcCodePlane code_plane(const TokenArray& rows, const Cache& cache, const Divisors& factors, bool is_4over6) {
  PcCodePlane plane = {};
  plane.rows = device_tokens(rows);
  plane.stored = device_stored(cache);
  plane.factors = address_of(factors.data);
  plane.factor = factors.for_all;
  plane.factor_stride = factors.stride;
  plane.is_4over6 = is_4over6 ? 1 : 0;
  plane.num_heads = make_divisor(rows.num_heads);
  plane.dim = clamped(rows.dim);
  const auto chunks = static_cast<uint64_t>(ceil_div(rows.dim, 8));
  plane.lanes_shift = std::min<pc_int32>(5, std::bit_width(chunks - 1));
  plane.in_vectors = moves_vectors(rows, cache) ? 1 : 0;
  PC_EXPECTS(rows.dim < INT32_MAX / 2 && rows.num_heads <= kMaxUnits >> plane.lanes_shift, ShapeError, "a token has ",
             rows.num_heads, " heads of ", rows.dim, "; on CUDA it must have fewer than ", kMaxUnits, " numbers");
  return plane;
}

inline void add_code_launches(std::vector<CodeLaunch>& launches, const WriteArgs& args, const PcCodePlane* planes,
                              int64_t num_planes, CodeLaunch launch) {
  int64_t threads = 1;  // per token
  for (int64_t i = 0; i < num_planes; ++i) {
    threads = std::max(threads, int64_t{planes[i].num_heads.divisor} << planes[i].lanes_shift);
  }
  const int64_t tokens_at_most = kMaxUnits / threads;
  for (int64_t token = 0; token < args.slots.size; token += tokens_at_most) {
    const int64_t tokens = std::min(tokens_at_most, args.slots.size - token);
    PcCodeParams& params = launch.params;
    params.slots.data = address_of(args.slots.data + token * args.slots.stride);
    params.slots.size = static_cast<pc_int32>(tokens);
    for (int64_t i = 0; i < num_planes; ++i) {
      params.planes[i] = planes[i];
      params.planes[i].rows.data += static_cast<pc_address>(token * planes[i].rows.token_stride * size_of(launch.from));
      params.planes[i].num_rows = static_cast<pc_int32>(tokens * planes[i].num_heads.divisor);
    }
    launch.grid = {ceil_div(tokens * threads, kThreads), num_planes, 1};
    launches.push_back(launch);
  }
}

}  // namespace internal

// Return the launches for the planes of `args` that have a format: keys and values share them if the dtypes of their
// new numbers are equal. The scales of `args` are ignored.
inline std::vector<CodeLaunch> code_launches(const WriteArgs& args, const Divisors& of_keys, const Divisors& of_values,
                                             bool is_4over6) {
  std::vector<CodeLaunch> launches;
  CodeLaunch launch;
  internal::fill_slots(launch.params, args);
  const bool has_keys = args.key_cache.format != Format::Plain, has_values = args.value_cache.format != Format::Plain;
  std::vector<PcCodePlane> planes;
  if (has_keys) planes.push_back(internal::code_plane(args.key, args.key_cache, of_keys, is_4over6));
  if (has_values) planes.push_back(internal::code_plane(args.value, args.value_cache, of_values, is_4over6));
  if (planes.empty()) return launches;
  launch.from = has_keys ? args.key.type : args.value.type;
  const bool is_one = planes.size() == 1 || args.key.type == args.value.type;
  internal::add_code_launches(launches, args, planes.data(), is_one ? static_cast<int64_t>(planes.size()) : 1, launch);
  if (is_one) return launches;
  launch.from = args.value.type;
  internal::add_code_launches(launches, args, &planes[1], 1, launch);
  return launches;
}

}  // namespace pagecore::cuda
