// Parts of the kernels that score keys of the sparse indexer: the keys of a query token, and its weights.
#pragma once

#include "cuda_src/latent/rows/numbers.cuh"

namespace pagecore {

PC_DEVICE float weight_of(const PcIndexScoreParams& params, int token, int head) {
  const pc_int64 at = token * params.weight_stride + head;
  if (params.weight_type == PC_FLOAT32) return Global<float>(params.weights).load(at);
  if (params.weight_type == PC_FLOAT16) return pc_to_float(Global<pc_half>(params.weights).load(at));
  return pc_to_float(Global<pc_bfloat16>(params.weights).load(at));
}

// A stored key and its scale.
struct KeyPosition {
  Global<pc_uint8> key;
  float scale;
};

// The columns of a query token that a block of threads computes.
struct IndexRow {
  // The scores of columns from `visible` on are -inf.
  PC_MEMBER IndexRow(const PcIndexScoreParams& params, int token)
      : out(Global<float>(params.out) + token * params.out_stride) {
    const QueryOfSequence query = sequence_of(params.batch, token);
    row = query.row;
    begin = pc_block_x() * params.keys_per_block;
    end = min_of(begin + params.keys_per_block, params.width);
    visible = 0;
    if (row < 0) return;
    const int hidden = params.causal ? query.later : 0;  // fault: index_hidden_keys
    visible = length_of(params.batch, query.sequence) - hidden;
  }

  PC_MEMBER KeyPosition key(const PcIndexScoreParams& params, int position) const {
    const int entry = divide(position, params.batch.block_size);
    const int offset = position - entry * params.batch.block_size.divisor;
    const pc_int64 block = block_in_cache(params.batch, row, entry, 0, 0);
    KeyPosition at = {Global<pc_uint8>(params.keys) + (block * params.block_stride + offset * params.token_stride),
                      1.0f};
    if (params.scales == 0) return at;
    const pc_int64 scale = block * params.scale_block_stride + offset * params.scale_token_stride;
    at.scale = (Global<pc_uint8>(params.scales) + scale).as<float>().load(0);
    return at;
  }

  Global<float> out;
  pc_int64 row;  // of the block table
  int begin;
  int end;
  int visible;
};

}  // namespace pagecore
