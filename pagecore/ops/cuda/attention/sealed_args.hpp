// Sealed blocks as structs of the CUDA ABI.
#pragma once

#include "cuda_src/abi/sealed.h"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore::cuda {

[[nodiscard]] inline PcSealedPlane device_sealed_plane(const SealedPlane& plane) {
  PcSealedPlane result = {};
  result.words = address_of(plane.words);
  result.scales = address_of(plane.scales);
  result.block_stride = plane.block_stride;
  result.head_stride = plane.head_stride;
  result.row_stride = plane.row_stride;
  result.scales_block_stride = plane.scales_block_stride;
  result.scales_head_stride = plane.scales_head_stride;
  result.scales_row_stride = plane.scales_row_stride;
  result.group_stride = plane.group_stride;
  result.least_stride = plane.least_stride;
  result.scale_type = static_cast<PcFloat>(plane.scale_type);
  result.bits = static_cast<pc_int32>(plane.bits);
  result.group = clamped(plane.group);
  return result;
}

// Set everything but the parameters of the other tokens.
inline void set_sealed(PcSealedAttentionParams& params, const SealedBlocks& blocks) {
  params.key = device_sealed_plane(blocks.key);
  params.value = device_sealed_plane(blocks.value);
  params.table = device_table(blocks.table);
  params.lens = device_indices(blocks.lens);
  params.num_blocks = clamped(blocks.num_blocks);
}

// Return true if decode_sealed, or prefill_sealed, serves the planes of a call: 16 tokens are in one block, in one
// group and in one unit of a selection, rows of keys are whole units of cp.async, and rows of values whole words.
// Numbers that become halves need scales of float16: others can have any magnitude. Keys become halves in prompts
// alone.
[[nodiscard]] inline bool serves_sealed(const PcSealedAttentionParams& params, bool prompts) {
  const PcSealedPlane &key = params.key, &value = params.value;
  const auto all = [](auto... numbers) { return (uint64_t{0} | ... | static_cast<uint64_t>(numbers)); };
  const pc_int64 size = value.scale_type == PC_FLOAT32 ? 4 : 2;
  const PcSelection& selection = params.attention.selection;
  const bool tiles = params.attention.block_size % 16 == 0 && key.group % 16 == 0 &&
                     (selection.entries == 0 || selection.unit % 16 == 0);
  const bool keys =
      allows(all(key.words, key.block_stride, key.head_stride, key.row_stride, key.scales, key.scales_block_stride,
                 key.scales_head_stride, key.scales_row_stride, key.least_stride),
             16);
  const bool words = allows(all(value.words, value.block_stride, value.head_stride, value.row_stride), 4);
  const bool scales =
      allows(all(value.scales, value.scales_block_stride, value.scales_head_stride, value.scales_row_stride), 4);
  const bool pairs = value.least_stride == size && value.group_stride == 2 * size;
  const bool halves = value.scale_type == PC_FLOAT16 && (!prompts || key.scale_type == PC_FLOAT16);
  const bool in_range = params.attention.query_type != PC_FLOAT16 || halves;
  return tiles && keys && words && scales && pairs && in_range;
}

}  // namespace pagecore::cuda
