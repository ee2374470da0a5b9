// Scalar reference conversions of float16, bfloat16 and float32, and views of arrays as kernel arguments.
#pragma once

#include <cmath>
#include <cstring>

#include "pagecore/ops/plan.hpp"
#include "tests/ops/native/arrays.hpp"

namespace pagecore::test {

constexpr std::initializer_list<Float> kFloats = {Float::F32, Float::F16, Float::BF16};

inline double widen(Float type, const char* from) {
  if (type == Float::F32) {
    float number;
    std::memcpy(&number, from, 4);
    return number;
  }
  uint16_t half;
  std::memcpy(&half, from, 2);
  const int exponent_bits = type == Float::F16 ? 5 : 8, fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (half >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = half & ((1 << fraction_bits) - 1);
  const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

// Rounds to nearest, ties to even.
inline void narrow(Float type, double number, char* to) {
  if (type == Float::F32) {
    const auto single = static_cast<float>(number);
    std::memcpy(to, &single, 4);
    return;
  }
  const int exponent_bits = type == Float::F16 ? 5 : 8, fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
  const double magnitude = std::fabs(number);
  const auto infinite = static_cast<uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
  uint16_t half = infinite;
  if (std::isnan(number)) {
    half = static_cast<uint16_t>(infinite | (1 << (fraction_bits - 1)));
  } else if (!std::isinf(number)) {
    // Round to an integer in units of the last place of its binade, or of the subnormals.
    const int exponent = std::max(magnitude == 0.0 ? -bias : std::ilogb(magnitude), 1 - bias);
    const double units = std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent));
    const double bits = units + std::ldexp(exponent + bias - 1, fraction_bits);
    half = bits < infinite ? static_cast<uint16_t>(bits) : infinite;
  }
  half = static_cast<uint16_t>(half | sign);
  std::memcpy(to, &half, 2);
}

inline bool same_number(Float type, const char* a, const char* b) {
  if (std::memcmp(a, b, static_cast<size_t>(size_of(type))) == 0) return true;
  return std::isnan(widen(type, a)) && std::isnan(widen(type, b));
}

// [token, head, dim] and [block, token, head, dim].
inline TokenArray as_rows(const Array& array, Float type) {
  return {array.data(), type, array.shape(0), array.shape(1), array.shape(2), array.stride(0), array.stride(1)};
}
inline Cache as_cache(const Array& array, Float type) {
  return {array.data(),
          type,
          array.shape(0),
          array.shape(1),
          array.shape(2),
          array.shape(3),
          array.stride(0),
          array.stride(1),
          array.stride(2),
          Format::Plain,
          {}};
}
inline BlockArray as_blocks(const Array& array, int32_t dtype) {
  BlockArray blocks;
  blocks.data = array.data();
  blocks.dtype = dtype;
  blocks.num_blocks = array.shape(0);
  blocks.block_stride = array.stride(0);
  blocks.itemsize = array.itemsize();
  blocks.ndim = static_cast<int32_t>(array.shape().size()) - 1;
  for (size_t axis = 1; axis < array.shape().size(); ++axis) {
    blocks.shape[axis - 1] = array.shape(axis);
    blocks.strides[axis - 1] = array.stride(axis);
  }
  return blocks;
}
inline Lse as_lse(const Array& array) { return {array.data(), array.shape(0), array.stride(0), array.stride(1)}; }

// One float for each head.
class HeadNumbers {
 public:
  HeadNumbers(Random& random, int64_t num_heads, double low, double high)
      : type_(random.pick(kFloats)), array_(random, {num_heads, 1}, size_of(type_)) {
    for (int64_t head = 0; head < num_heads; ++head)
      narrow(type_, low + (high - low) * random.unit(), array_.at({head, 0}));
  }
  [[nodiscard]] PerHead per_head() const { return {array_.data(), type_, array_.stride(0)}; }
  [[nodiscard]] double operator[](int64_t head) const { return widen(type_, array_.at({head, 0})); }

 private:
  Float type_;
  Array array_;
};

// Calls visit(index) for every element of a shape.
template <typename Visit>
void for_each_index(const std::vector<int64_t>& shape, Visit&& visit) {
  std::vector<int64_t> index(shape.size(), 0);
  for (const int64_t size : shape) {
    if (size == 0) return;
  }
  for (;;) {
    visit(index);
    size_t axis = shape.size();
    while (axis > 0 && ++index[axis - 1] == shape[axis - 1]) index[--axis] = 0;
    if (axis == 0) return;
  }
}

inline void same_bytes(const Array& array, const std::vector<char>& expected, const char* what) {
  array.memory().check();
  const std::vector<char> found = array.memory().copy();
  for (size_t i = 0; i < found.size(); ++i)
    PC_CHECK(found[i] == expected[i], what, ": byte ", i, " of ", found.size(), " is wrong");
}

// A plan as the operations take it.
[[nodiscard]] inline cpu::PlanView view_of(const Plan& plan) {
  cpu::PlanView view;
  view.items = plan.items();
  view.num_items = plan.counts().num_items;
  view.num_partial_rows = plan.counts().num_partial_rows;
  view.cu_query_lens = plan.cu_query_lens();
  view.seq_lens = plan.seq_lens();
  view.num_sequences = plan.num_sequences();
  view.num_query_heads = plan.options.num_query_heads;
  view.num_kv_heads = plan.options.num_kv_heads;
  view.causal = plan.options.causal;
  view.window_left = plan.options.window_left;
  view.window_right = plan.options.window_right;
  view.batch_invariant = plan.options.batch_invariant;
  return view;
}

}  // namespace pagecore::test
