// Arrays of rows to codes and back, for quantize and dequantize.
#pragma once

#include "pagecore/ops/cpu/codec.hpp"
#include "pagecore/ops/cpu/kernels/rows/convert_rows.hpp"
#include "pagecore/ops/cpu/kernels/rows/dequantize.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE float factor_at(const Codec& codec, int64_t row) {
  return codec.num_factors == 0 ? 1.0f : codec.factors[row % codec.num_factors];
}

inline void quantize_rows(const Codec& codec, int64_t begin, int64_t end) {
  // Rows with different factors are separate batches.
  const bool casts = codec.scales == nullptr;
  const int64_t step = casts || codec.num_factors > 1 ? 1 : end - begin;
  const Float to = codec.format == Format::E4M3 ? Float::F8E4M3FN : Float::F8E5M2;
  const Convert convert = casts ? conversion(codec.type, to, codec.num_factors > 0) : nullptr;
  const QuantizeRows quantize = casts ? nullptr : quantizer(codec.type, codec.format, codec.four_over_six);
  for (int64_t i = begin; i < end; i += step) {
    const char* numbers = codec.numbers + i * codec.numbers_stride;
    char* codes = codec.codes + i * codec.codes_stride;
    if (casts) {
      convert(numbers, codes, codec.dim, factor_at(codec, i));
    } else {
      quantize({numbers, codes, codec.scales + i * codec.scales_stride, codec.numbers_stride, codec.codes_stride,
                codec.scales_stride, step, codec.dim, factor_at(codec, i)});
    }
  }
}

inline void dequantize_rows(const Codec& codec, int64_t begin, int64_t end) {
  const DequantizeRow dequantize = dequantizer(codec.format, codec.type);
  for (int64_t i = begin; i < end; ++i) {
    dequantize(codec.codes + i * codec.codes_stride, codec.scales + i * codec.scales_stride, codec.dim,
               factor_at(codec, i), codec.numbers + i * codec.numbers_stride);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
