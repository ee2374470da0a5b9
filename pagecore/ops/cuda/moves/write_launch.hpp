// Launches of write_kv for a slot-mapped write: the unit that a thread moves at once, and the tokens of each launch.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

// Divisors: one for each head or for all heads in device memory, or one for all heads.
struct Divisors {
  const char* data = nullptr;  // float32
  float for_all = 1.0f;
  int32_t stride = 1;  // of `data` in elements: 1, or 0 for one number
};

struct WriteLaunch {
  PcWriteParams params = {};
  Float from = Float::F32;
  Float to = Float::F32;
  Grid grid;
};

namespace internal {

struct WritePlaneShape {
  PcWritePlane plane = {};
  int64_t rows_per_token = 1;
  int64_t row = 0;  // elements
};

// Return the widest unit, in elements, that the alignment of both arrays allows.
inline int64_t unit_of(const TokenArray& rows, const Cache& cache, int64_t rows_per_token, int64_t row) {
  uint64_t from = address_of(rows.data) | bits_of(rows.token_stride);
  uint64_t to = address_of(cache.data);
  if (cache.num_blocks > 1) to |= bits_of(cache.block_stride);
  if (cache.block_size > 1) to |= bits_of(cache.token_stride);
  if (rows.num_tokens == 1) from = address_of(rows.data);
  if (rows_per_token > 1) from |= bits_of(rows.head_stride), to |= bits_of(cache.head_stride);
  const int64_t from_size = size_of(rows.type), to_size = size_of(cache.type);
  int64_t unit = 16 / std::min(from_size, to_size);
  while (unit > 1 && (row % unit != 0 || !allows(from, unit * from_size) || !allows(to, unit * to_size))) unit /= 2;
  return unit;
}

inline WritePlaneShape shape_of(const TokenArray& rows, const Cache& cache, const Divisors& divisors) {
  const int64_t from_size = size_of(rows.type), to_size = size_of(cache.type);
  const bool heads_follow = rows.head_stride == rows.dim * from_size && cache.head_stride == rows.dim * to_size;
  WritePlaneShape shape;
  shape.row = rows.dim;
  if (rows.num_heads == 1 || (heads_follow && (divisors.data == nullptr || divisors.stride == 0))) {
    shape.row *= rows.num_heads;
  } else {
    shape.rows_per_token = rows.num_heads;
  }
  const int64_t unit = unit_of(rows, cache, shape.rows_per_token, shape.row);
  PC_EXPECTS(rows.num_heads <= kMaxUnits / rows.dim, ShapeError, "a token has ", rows.num_heads, " heads of ", rows.dim,
             "; on CUDA it must have fewer than ", kMaxUnits, " numbers");
  PcWritePlane& plane = shape.plane;
  plane.rows = device_tokens(rows);
  plane.cache = device_cache(cache);
  plane.scales = address_of(divisors.data);
  plane.scale = divisors.for_all;
  plane.scale_stride = divisors.stride;
  plane.unit = static_cast<pc_int32>(unit);
  plane.units_per_row = make_divisor(shape.row / unit);
  plane.units_per_token = make_divisor(shape.rows_per_token * (shape.row / unit));
  return shape;
}

inline void add_launches(std::vector<WriteLaunch>& launches, const WriteArgs& args, const PcWritePlane* planes,
                         int64_t num_planes, WriteLaunch launch, int64_t num_multiprocessors) {
  int64_t units = 1;  // per token
  for (int64_t i = 0; i < num_planes; ++i) units = std::max<int64_t>(units, planes[i].units_per_token.divisor);
  const int64_t tokens_at_most = kMaxUnits / units, from_size = size_of(launch.from);
  for (int64_t token = 0; token < args.slots.size; token += tokens_at_most) {
    const int64_t tokens = std::min(tokens_at_most, args.slots.size - token);
    PcWriteParams& params = launch.params;
    const int64_t each = units_per_thread(tokens * units * num_planes, num_multiprocessors);
    params.units_per_thread = static_cast<pc_int32>(each);
    params.slots.data = address_of(args.slots.data + token * args.slots.stride);
    params.slots.size = static_cast<pc_int32>(tokens);
    for (int64_t i = 0; i < num_planes; ++i) {
      params.planes[i] = planes[i];
      params.planes[i].rows.data += static_cast<pc_address>(token * planes[i].rows.token_stride * from_size);
      params.planes[i].num_units = static_cast<pc_int32>(tokens * planes[i].units_per_token.divisor);
    }
    launch.grid = {ceil_div(tokens * units, kThreads * each), num_planes, 1};
    launches.push_back(launch);
  }
}

// Fill the slots of a launch, and the sizes of the caches that they are in.
template <typename Params>
inline void fill_slots(Params& params, const WriteArgs& args) {
  const int64_t size = args.key_cache.block_size;
  params.slots = device_indices(args.slots);
  params.num_slots = args.key_cache.num_blocks * size;
  params.block_size = make_divisor(size);
  params.block_shift = std::has_single_bit(bits_of(size)) ? std::countr_zero(bits_of(size)) : -1;
}

}  // namespace internal

// Return the launches for the planes of `args` without a format: key and value share them if their types are equal. The
// scales of `args` are ignored.
inline std::vector<WriteLaunch> write_launches(const WriteArgs& args, const Divisors& of_keys,
                                               const Divisors& of_values, int64_t num_multiprocessors) {
  std::vector<WriteLaunch> launches;
  WriteLaunch launch;
  internal::fill_slots(launch.params, args);
  const bool has_keys = args.key_cache.format == Format::Plain, has_values = args.value_cache.format == Format::Plain;
  std::vector<PcWritePlane> planes;
  if (has_keys) planes.push_back(internal::shape_of(args.key, args.key_cache, of_keys).plane);
  if (has_values) planes.push_back(internal::shape_of(args.value, args.value_cache, of_values).plane);
  if (planes.empty()) return launches;
  const bool is_one =
      planes.size() == 1 || (args.key.type == args.value.type && args.key_cache.type == args.value_cache.type);
  launch.from = has_keys ? args.key.type : args.value.type;
  launch.to = has_keys ? args.key_cache.type : args.value_cache.type;
  internal::add_launches(launches, args, planes.data(), is_one ? static_cast<int64_t>(planes.size()) : 1, launch,
                         num_multiprocessors);
  if (is_one) return launches;
  launch.from = args.value.type;
  launch.to = args.value_cache.type;
  internal::add_launches(launches, args, &planes[1], 1, launch, num_multiprocessors);
  return launches;
}

}  // namespace pagecore::cuda
