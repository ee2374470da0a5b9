// The function that quantises rows, for each format, dtype and instruction set.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quantize_groups.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize_nvfp4.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize_rows.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

template <Float From>
PC_FORCE_INLINE QuantizeRows quantizer_from(Format format, bool four_over_six) {
  switch (format) {
    case Format::E4M3Token: return quantize_float8_token<From>;
    case Format::I8Token: return quantize_int8_token<From>;
    case Format::I4Token: return quantize_int4_token<From>;
    case Format::FP4Block16: return quantize_fp4_block16<From>;
    case Format::NVFP4: return four_over_six ? quantize_nvfp4_4over6<From> : quantize_nvfp4<From>;
    default: return quantize_mxfp8<From>;
  }
}

// The function of a format that computes scales.
inline QuantizeRows quantizer(Float from, Format format, bool four_over_six) {
  return with_float(from, [&]<Float From>() { return quantizer_from<From>(format, four_over_six); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
