// Launches of quantize_states and dequantize_states: the planes and pairs of each, and the keys of a block of threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_src/abi/states.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/state_plane.hpp"

namespace pagecore::cuda {

struct StateLaunch {
  PcStateParams params = {};
  Float type = Float::F32;
  Grid grid;
};

namespace internal {

// Return true if one launch can convert both planes.
[[nodiscard]] inline bool are_alike(const StatePlane& a, const StatePlane& b) {
  return a.type == b.type && a.num_matrices == b.num_matrices && a.num_values == b.num_values &&
         a.num_keys == b.num_keys && a.state_stride == b.state_stride && a.codes_stride == b.codes_stride &&
         a.scales_stride == b.scales_stride;
}

// Return true if 16 bytes of numbers, their codes and their scales can be moved at once.
[[nodiscard]] inline bool moves_units(const StatePlane& plane, int64_t count) {
  const uint64_t numbers =
      address_of(plane.state) | address_of(plane.scales) | bits_of(plane.state_stride) | bits_of(plane.scales_stride);
  const uint64_t codes = address_of(plane.codes) | bits_of(plane.codes_stride);
  return plane.num_keys % count == 0 && allows(numbers, PC_STATE_BYTES) && allows(codes, count);
}

// Return a launch for planes like the first, without planes and pairs.
[[nodiscard]] inline StateLaunch state_launch(const StatePlane& plane, bool in_units) {
  StateLaunch launch;
  PcStateParams& params = launch.params;
  const int64_t unit = in_units ? PC_STATE_BYTES / size_of(plane.type) : 1, units = plane.num_keys / unit;
  const int64_t lanes = std::min<int64_t>(PC_STATE_LANES, static_cast<int64_t>(std::bit_ceil(bits_of(units))));
  const int64_t stretches = ceil_div(units, lanes);
  PC_EXPECTS(
      plane.num_values <= kMaxUnits && plane.num_keys <= kMaxUnits && plane.num_matrices <= kMaxUnits / stretches,
      ShapeError, "a state has ", plane.num_matrices, " matrices of ", plane.num_values, " values and ", plane.num_keys,
      " keys; on CUDA each axis must be below ", kMaxUnits, ": split the call");
  params.state_stride = plane.state_stride;
  params.codes_stride = plane.codes_stride;
  params.scales_stride = plane.scales_stride;
  params.num_values = static_cast<pc_int32>(plane.num_values);
  params.num_keys = static_cast<pc_int32>(plane.num_keys);
  params.stretches = make_divisor(stretches);
  params.lanes_shift = std::countr_zero(bits_of(lanes));
  params.in_units = in_units ? 1 : 0;
  launch.type = plane.type;
  launch.grid.x = plane.num_matrices * stretches;
  return launch;
}

// Append the launches of planes with one shape, for every run of pairs.
inline void add_state_launches(std::vector<StateLaunch>& launches, const std::vector<StatePlane>& alike,
                               const int64_t* pairs, int64_t count) {
  const int64_t unit = PC_STATE_BYTES / size_of(alike.front().type);
  const bool in_units =
      std::all_of(alike.begin(), alike.end(), [&](const StatePlane& plane) { return moves_units(plane, unit); });
  StateLaunch launch = state_launch(alike.front(), in_units);
  PcStateParams& params = launch.params;
  for (int64_t begin = 0; begin < std::ssize(alike); begin += PC_MAX_STATES) {
    launch.grid.z = std::min<int64_t>(std::ssize(alike) - begin, PC_MAX_STATES);
    for (int64_t i = 0; i < launch.grid.z; ++i) {
      const StatePlane& plane = alike[static_cast<size_t>(begin + i)];
      params.states[i] = address_of(plane.state);
      params.codes[i] = address_of(plane.codes);
      params.scales[i] = address_of(plane.scales);
    }
    for (int64_t first = 0; first < count; first += PC_MAX_PAIRS) {
      launch.grid.y = std::min<int64_t>(count - first, PC_MAX_PAIRS);
      for (int64_t i = 0; i < launch.grid.y; ++i) {
        params.pairs[i][0] = static_cast<pc_int32>(pairs[2 * (first + i)]);
        params.pairs[i][1] = static_cast<pc_int32>(pairs[2 * (first + i) + 1]);
      }
      launches.push_back(launch);
    }
  }
}

}  // namespace internal

// Launches that convert slots of every plane: slot pairs[2 * i] of the state and slot pairs[2 * i + 1] of the codes,
// for i < count. The caller has checked the slots; no slot that is written occurs twice.
[[nodiscard]] inline std::vector<StateLaunch> state_launches(std::vector<StatePlane> planes, const int64_t* pairs,
                                                             int64_t count) {
  std::vector<StateLaunch> launches;
  if (count == 0) return launches;
  while (!planes.empty()) {
    const StatePlane first = planes.front();
    std::vector<StatePlane> alike, others;
    for (const StatePlane& plane : planes) (internal::are_alike(plane, first) ? alike : others).push_back(plane);
    if (first.num_matrices > 0 && first.num_keys > 0) internal::add_state_launches(launches, alike, pairs, count);
    planes = std::move(others);
  }
  return launches;
}

}  // namespace pagecore::cuda
