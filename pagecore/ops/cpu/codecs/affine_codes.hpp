// Codes of 2 or 4 bits with a scale and a least number for each group, on the host; see pagecore/ops/affine_codes.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/affine_codes.hpp"

namespace pagecore::cpu {

// Codes and scales of all numbers, and back.
void quantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept;
void dequantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept;

}  // namespace pagecore::cpu
