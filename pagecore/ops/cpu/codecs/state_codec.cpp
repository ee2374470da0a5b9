#include "pagecore/ops/cpu/codecs/state_codec.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "pagecore/ops/cpu/codecs/bfloat16.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Keys that are converted together: their scales stay in the L1 cache.
constexpr int64_t kTogether = 256;

struct Single {
  using Number = float;
  static float read(float x) { return x; }
  static float write(float x) { return x; }
};
struct Brain {
  using Number = uint16_t;
  static float read(uint16_t x) { return from_bf16(x); }
  static uint16_t write(float x) { return to_bf16(x); }
};

// The nearest integer, ties to even, of a number of magnitude up to 127; 0 for NaN.
inline int8_t nearest_code(float x) {
  constexpr float kMagic = 0x1.8p23f;  // its last place is 1
  const float number = x == x ? std::min(std::max(x, -127.0f), 127.0f) : 0.0f;
  return static_cast<int8_t>(std::bit_cast<int32_t>(number + kMagic) - std::bit_cast<int32_t>(kMagic));
}

template <typename T>
void quantize_matrix(const StatePlane& plane, const typename T::Number* state, int8_t* codes,
                     typename T::Number* scales) {
  for (int64_t first = 0; first < plane.num_keys; first += kTogether) {
    const int64_t count = std::min(kTogether, plane.num_keys - first);
    // Bits of magnitudes: they are ordered as the magnitudes are, and NaN is above infinity.
    uint32_t largest[kTogether] = {};
    float scale[kTogether];
    for (int64_t v = 0; v < plane.num_values; ++v) {
      const typename T::Number* row = state + v * plane.num_keys + first;
      for (int64_t k = 0; k < count; ++k) {
        largest[k] = std::max(largest[k], std::bit_cast<uint32_t>(T::read(row[k])) & 0x7fffffffu);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      scales[first + k] = T::write(std::bit_cast<float>(largest[k]) / 127.0f);
      scale[k] = T::read(scales[first + k]);
    }
    for (int64_t v = 0; v < plane.num_values; ++v) {
      const typename T::Number* row = state + v * plane.num_keys + first;
      int8_t* const out = codes + v * plane.num_keys + first;
      for (int64_t k = 0; k < count; ++k) out[k] = nearest_code(T::read(row[k]) / scale[k]);  // 0 / 0 is NaN
    }
  }
}

template <typename T>
void dequantize_matrix(const StatePlane& plane, typename T::Number* state, const int8_t* codes,
                       const typename T::Number* scales) {
  for (int64_t v = 0; v < plane.num_values; ++v) {
    for (int64_t k = 0; k < plane.num_keys; ++k) {
      const int64_t at = v * plane.num_keys + k;
      state[at] = T::write(static_cast<float>(codes[at]) * T::read(scales[k]));
    }
  }
}

template <typename Convert>
void for_each_matrix(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads,
                     Convert&& convert) {
  const int64_t units = count * plane.num_matrices, size = plane.num_values * plane.num_keys;
  const int64_t bytes = units * size * (size_of(plane.type) + 1);
  parallel_for(units, threads_to_move(bytes, num_threads), [&](int64_t unit, int64_t) noexcept {
    const int64_t pair = unit / plane.num_matrices, matrix = unit % plane.num_matrices;
    convert(plane.state + pairs[2 * pair] * plane.state_stride + matrix * size * size_of(plane.type),
            plane.codes + pairs[2 * pair + 1] * plane.codes_stride + matrix * size,
            plane.scales + pairs[2 * pair + 1] * plane.scales_stride + matrix * plane.num_keys * size_of(plane.type));
  });
}

template <typename T>
void quantize_all(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) {
  using Number = typename T::Number;
  for_each_matrix(plane, pairs, count, num_threads, [&](char* state, int8_t* codes, char* scales) {
    quantize_matrix<T>(plane, reinterpret_cast<const Number*>(state), codes, reinterpret_cast<Number*>(scales));
  });
}

template <typename T>
void dequantize_all(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) {
  using Number = typename T::Number;
  for_each_matrix(plane, pairs, count, num_threads, [&](char* state, int8_t* codes, char* scales) {
    dequantize_matrix<T>(plane, reinterpret_cast<Number*>(state), codes, reinterpret_cast<const Number*>(scales));
  });
}

}  // namespace

void quantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept {
  (plane.type == Float::F32 ? quantize_all<Single> : quantize_all<Brain>)(plane, pairs, count, num_threads);
}

void dequantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept {
  (plane.type == Float::F32 ? dequantize_all<Single> : dequantize_all<Brain>)(plane, pairs, count, num_threads);
}

}  // namespace pagecore::cpu
