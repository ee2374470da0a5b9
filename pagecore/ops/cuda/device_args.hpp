// Arguments of the kernels (ops/args.hpp) as the structs of the CUDA ABI: strides in elements, lengths in 32 bits.
//
// No other code converts them, so that every kernel clamps in the same way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_src/abi/formats.h"
#include "pagecore/ops/args.hpp"

namespace pagecore::cuda {

// The kernels use the numbers of the dtype table.
static_assert(static_cast<int>(Float::F32) == PC_FLOAT32);
static_assert(static_cast<int>(Float::F16) == PC_FLOAT16);
static_assert(static_cast<int>(Float::BF16) == PC_BFLOAT16);
// They also use those of the format table.
static_assert(static_cast<int>(Format::Plain) == PC_PLAIN);
static_assert(static_cast<int>(Format::I4Token) == PC_I4_TOKEN);
static_assert(static_cast<int>(Format::MXFP8) == PC_MXFP8);

[[nodiscard]] inline pc_address address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// Clamp a length to int32; kernels never address elements past 2^31 - 1.
[[nodiscard]] constexpr pc_int32 clamped(int64_t length) {
  return static_cast<pc_int32>(std::min<int64_t>(length, INT32_MAX));
}

// Bytes of an index.
[[nodiscard]] constexpr int64_t index_size(bool wide) { return wide ? 8 : 4; }

[[nodiscard]] inline PcIndices device_indices(const Indices& indices) {
  return {address_of(indices.data), indices.stride / index_size(indices.wide), clamped(indices.size), indices.wide};
}

[[nodiscard]] inline PcTable device_table(const Table& table) {
  PcTable result = {};
  result.data = address_of(table.data);
  result.row_stride = table.row_stride / index_size(table.wide);
  result.num_rows = clamped(table.num_rows);
  result.width = clamped(table.width);
  result.wide = table.wide;
  return result;
}

[[nodiscard]] inline PcRows device_tokens(const TokenArray& tokens) {
  const int64_t size = size_of(tokens.type);
  return {address_of(tokens.data), tokens.token_stride / size, tokens.head_stride / size};
}

[[nodiscard]] inline PcCache device_cache(const Cache& cache) {
  const int64_t size = size_of(cache.type);
  return {address_of(cache.data), cache.block_stride / size, cache.token_stride / size, cache.head_stride / size};
}

// Strides in bytes.
[[nodiscard]] inline PcStored device_stored(const Cache& cache) {
  PcStored stored = {};
  stored.codes = {address_of(cache.data), cache.block_stride, cache.token_stride, cache.head_stride};
  stored.scales = {address_of(cache.scales.data), cache.scales.block_stride, cache.scales.token_stride,
                   cache.scales.head_stride};
  stored.format = static_cast<PcFormat>(cache.format);
  stored.type = cache.format == Format::Plain ? static_cast<PcFloat>(cache.type) : PC_FLOAT32;
  return stored;
}

}  // namespace pagecore::cuda
