// Rows of merges: their places, and the weights of their parts.
#pragma once

#include "cuda_src/abi/moves.h"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

// An lse as the weight of its part: +inf is what FlashAttention reports for a query without keys.
PC_DEVICE float log_weight(float lse) { return lse == pc_infinity() ? -pc_infinity() : lse; }

PC_DEVICE pc_int64 offset_in(const PcRows& rows, int token, int head) {
  return token * rows.token_stride + head * rows.head_stride;
}

PC_DEVICE pc_int64 offset_in(const PcLse& lse, int token, int head) {
  return token * lse.token_stride + head * lse.head_stride;
}

}  // namespace pagecore
