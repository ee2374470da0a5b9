// Pairs of blocks of the kernels that convert.
#pragma once

#include "cuda_src/abi/convert.h"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

struct ConvertPair {
  pc_int64 source;
  pc_int64 target;
  bool is_valid;
};

PC_DEVICE ConvertPair convert_pair(const PcConvertPairs& pairs, int i) {
  ConvertPair pair = {i, i, false};
  if (pairs.on_device != 0) {
    const PcIndices sources = {pairs.on_device, pairs.pair_stride, pairs.num_pairs, pairs.wide};
    const pc_address column = static_cast<pc_address>(pairs.column_stride * (pairs.wide ? 8 : 4));
    const PcIndices targets = {pairs.on_device + column, pairs.pair_stride, pairs.num_pairs, pairs.wide};
    pair.source = load_index(sources, i);
    pair.target = load_index(targets, i);
  } else if (pairs.identity == 0) {
    pair.source = pairs.pairs[i][0];
    pair.target = pairs.pairs[i][1];
  }
  pair.is_valid = pair.source >= pairs.lowest && pair.source < pairs.num_source_blocks && pair.target >= pairs.lowest &&
                  pair.target < pairs.num_target_blocks;
  return pair;
}

// Calls convert(source, target) for the pairs of a block of threads: every pair, or every one of a column of the grid.
// All threads of a warp have the same pairs. If the axis of pairs is 1, each thread writes its bytes of all pairs in
// order, so that of several pairs with one target the last one stays.
template <typename Convert>
PC_DEVICE void for_each_pair(const PcConvertPairs& pairs, const Convert& convert) {
  PC_NO_UNROLL
  for (pc_int64 i = pc_block_y(); i < pairs.num_pairs; i += pc_num_blocks_y()) {
    const ConvertPair pair = convert_pair(pairs, static_cast<int>(i));
    if (pair.is_valid) convert(pair.source, pair.target);  // fault: convert_pairs_outside
  }
}

}  // namespace pagecore
