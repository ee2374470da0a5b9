// Host bodies of the primitives; primitives.cuh includes this file instead of its PTX bodies. Names and arguments are
// the same. The last argument defaults to the caller's place in the source.
#pragma once

#include <bit>
#include <cmath>
#include <type_traits>

#include "machine.hpp"
#include "numbers.hpp"

#define PC_DEVICE static inline
#define PC_MEMBER inline
#define PC_KERNEL(threads, blocks)
#define PC_UNROLL
#define PC_NO_UNROLL

#define PC_SITE emulator::Site site = emulator::Site::current()

#include "emulated_global.hpp"
#include "emulated_shared.hpp"

// ---- indices of a thread

[[gnu::always_inline]] PC_DEVICE int pc_thread() { return emulator::place.thread; }
[[gnu::always_inline]] PC_DEVICE int pc_num_threads() { return emulator::place.num_threads; }
[[gnu::always_inline]] PC_DEVICE int pc_lane() { return emulator::place.thread & 31; }
[[gnu::always_inline]] PC_DEVICE int pc_warp() { return emulator::place.thread >> 5; }
PC_DEVICE int pc_block_x() { return emulator::place.block[0]; }
PC_DEVICE int pc_block_y() { return emulator::place.block[1]; }
PC_DEVICE int pc_block_z() { return emulator::place.block[2]; }
PC_DEVICE int pc_num_blocks_x() { return emulator::place.num_blocks[0]; }
PC_DEVICE int pc_num_blocks_y() { return emulator::place.num_blocks[1]; }
PC_DEVICE int pc_num_blocks_z() { return emulator::place.num_blocks[2]; }

// ---- collectives

PC_DEVICE void pc_sync_block(PC_SITE) { emulator::sync_block(site); }
PC_DEVICE void pc_sync_warp(PC_SITE) { emulator::sync_warp(site); }

namespace emulator {

template <typename T>
T shuffle_value(Shuffle kind, T value, int operand, Site site) {
  static_assert(sizeof(T) == 4);
  return std::bit_cast<T>(shuffle(kind, std::bit_cast<uint32_t>(value), operand, site));
}

}  // namespace emulator

PC_DEVICE float pc_shuffle_xor(float value, int mask, PC_SITE) {
  return emulator::shuffle_value(emulator::Shuffle::exclusive_or, value, mask, site);
}
PC_DEVICE int pc_shuffle_xor(int value, int mask, PC_SITE) {
  return emulator::shuffle_value(emulator::Shuffle::exclusive_or, value, mask, site);
}
PC_DEVICE float pc_shuffle(float value, int lane, PC_SITE) {
  return emulator::shuffle_value(emulator::Shuffle::from_lane, value, lane, site);
}
PC_DEVICE int pc_shuffle(int value, int lane, PC_SITE) {
  return emulator::shuffle_value(emulator::Shuffle::from_lane, value, lane, site);
}
PC_DEVICE int pc_shuffle_up(int value, int delta, PC_SITE) {
  return emulator::shuffle_value(emulator::Shuffle::up, value, delta, site);
}
PC_DEVICE pc_uint32 pc_ballot(bool condition, PC_SITE) { return emulator::ballot(condition, site); }

PC_DEVICE void pc_fence_device() { emulator::fence_device(); }

[[gnu::always_inline]] PC_DEVICE int pc_opaque(int value) { return value; }

// ---- matrices

PC_DEVICE void pc_load_matrices(pc_uint32 (&r)[4], SharedAddress row, PC_SITE) {
  emulator::load_matrices(r, row, false, site);
}
PC_DEVICE void pc_load_matrices_transposed(pc_uint32 (&r)[4], SharedAddress row, PC_SITE) {
  emulator::load_matrices(r, row, true, site);
}

template <typename T>
PC_DEVICE void pc_multiply(float (&c)[4], const pc_uint32 (&a)[4], pc_uint32 b0, pc_uint32 b1, PC_SITE) {
  static_assert(std::is_same_v<T, pc_bfloat16> || std::is_same_v<T, pc_half>);
  const bool half = std::is_same_v<T, pc_half>;
  emulator::multiply(half ? emulator::MatrixType::half : emulator::MatrixType::bfloat16, c, a, b0, b1, site);
}

// ---- numbers

[[gnu::always_inline]] PC_DEVICE float pc_to_float(float value) { return value; }
[[gnu::always_inline]] PC_DEVICE float pc_to_float(pc_bfloat16 value) {
  return emulator::float_of_bfloat16(value.bits);
}
[[gnu::always_inline]] PC_DEVICE float pc_to_float(pc_half value) { return emulator::float_of_half(value.bits); }

template <typename T>
[[gnu::always_inline]] PC_DEVICE T pc_from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, pc_half>) {
    return {emulator::half_of_float(value)};
  } else {
    static_assert(std::is_same_v<T, pc_bfloat16>);
    return {emulator::bfloat16_of_float(value)};
  }
}

template <typename T>
[[gnu::always_inline]] PC_DEVICE pc_uint32 pc_pack(float low, float high) {
  static_assert(sizeof(T) == 2);
  return pc_from_float<T>(low).bits | static_cast<pc_uint32>(pc_from_float<T>(high).bits) << 16;
}

PC_DEVICE pc_uint32 pc_permute(pc_uint32 a, pc_uint32 b, pc_uint32 digits) {
  const pc_uint64 bytes = static_cast<pc_uint64>(b) << 32 | a;
  pc_uint32 result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<pc_uint32>(bytes >> (8 * (digits >> 4 * i & 7)) & 0xff) << 8 * i;
  }
  return result;
}

// Rounds to float32 and then to half, which differs from one rounding only where float32 is not exact.
PC_DEVICE pc_uint32 pc_fma_halves(pc_uint32 a, pc_uint32 b, pc_uint32 c) {
  pc_uint32 result = 0;
  for (int i = 0; i < 32; i += 16) {
    const float x = emulator::float_of_half(static_cast<pc_uint16>(a >> i));
    const float y = emulator::float_of_half(static_cast<pc_uint16>(b >> i));
    const float z = emulator::float_of_half(static_cast<pc_uint16>(c >> i));
    result |= static_cast<pc_uint32>(emulator::half_of_float(std::fma(x, y, z))) << i;
  }
  return result;
}

constexpr bool pc_converts_e4m3 = true;
PC_DEVICE pc_uint32 pc_convert_e4m3(pc_uint32 codes) {
  const pc_uint32 low = emulator::half_of_float(emulator::float_of_e4m3(static_cast<uint8_t>(codes)));
  const pc_uint32 high = emulator::half_of_float(emulator::float_of_e4m3(static_cast<uint8_t>(codes >> 8)));
  return low | high << 16;
}

[[gnu::always_inline]] PC_DEVICE int pc_count_bits(pc_uint32 bits) { return std::popcount(bits); }
[[gnu::always_inline]] PC_DEVICE float pc_bits_to_float(pc_uint32 bits) { return std::bit_cast<float>(bits); }
[[gnu::always_inline]] PC_DEVICE pc_uint32 pc_float_to_bits(float value) { return std::bit_cast<pc_uint32>(value); }
[[gnu::always_inline]] PC_DEVICE float pc_infinity() { return std::bit_cast<float>(0x7f800000u); }
// Of a number and a NaN, signalling or not, the number; std::fmax returns NaN for a signalling one.
[[gnu::always_inline]] PC_DEVICE float pc_max(float a, float b) { return a != a ? b : b != b ? a : std::fmax(a, b); }
[[gnu::always_inline]] PC_DEVICE float pc_fma(float a, float b, float c) { return std::fma(a, b, c); }
PC_DEVICE float pc_exp2(float value) {
  const float result = std::exp2(value);
  return result < 0x1p-126f ? 0.0f : result;
}
PC_DEVICE float pc_log2(float value) { return std::log2(value); }
