// The parameters of latent attention that are not those of paged attention, and the alignment of its rows.
#pragma once

#include <cstdint>

#include "cuda_src/abi/latent.h"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

// A plane of one head, with strides in bytes.
[[nodiscard]] inline PcCache byte_plane(const void* data, int64_t block_stride, int64_t token_stride) {
  return {address_of(data), block_stride, token_stride, 0};
}

// Return true if every row of an array begins at a multiple of 16 bytes.
[[nodiscard]] inline bool begins_at_vectors(const TokenArray& rows) {
  return allows(address_of(rows.data) | bits_of(rows.token_stride) | bits_of(rows.head_stride), 16);
}

// Return true if every row of a plane begins at a multiple of 16 bytes.
[[nodiscard]] inline bool begins_at_vectors(const PcCache& plane) {
  return allows(plane.data | bits_of(plane.block_stride) | bits_of(plane.token_stride), 16);
}

}  // namespace pagecore::cuda
