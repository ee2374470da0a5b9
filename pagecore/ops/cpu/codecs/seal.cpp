#include "pagecore/ops/cpu/codecs/seal.hpp"

#include <algorithm>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/codecs/affine_codes.hpp"
#include "pagecore/ops/cpu/moves/run_list.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Numbers that one core seals in a microsecond.
constexpr double kSealedPerUs = 300.0;

struct SealedPair {
  int64_t source;
  int64_t target;
};

// One block of all heads; the caller sets what differs between keys and values.
AffineCodes block_codes(const Cache& cache, const SealedPlane& plane, const SealedPair& pair) {
  AffineCodes codes;
  codes.numbers = cache.data + pair.source * cache.block_stride;
  codes.words = plane.words + pair.target * plane.block_stride;
  codes.scales = plane.scales + pair.target * plane.scales_block_stride;
  codes.type = cache.type;
  codes.scale_type = plane.scale_type;
  codes.bits = plane.bits;
  codes.group = plane.group;
  codes.num_matrices = cache.num_heads;
  codes.numbers_matrix_stride = cache.head_stride;
  codes.words_matrix_stride = plane.head_stride;
  codes.scales_matrix_stride = plane.scales_head_stride;
  codes.least_offset = plane.least_stride;
  return codes;
}

AffineCodes key_codes(const SealArgs& args, const SealedPair& pair) {
  AffineCodes codes = block_codes(args.key, args.sealed_key, pair);
  codes.num_entries = args.key.block_size;
  codes.num_lanes = args.key.dim;
  codes.entry_stride = args.key.token_stride;
  codes.lane_stride = size_of(args.key.type);
  codes.word_stride = args.sealed_key.row_stride;
  codes.word_lane_stride = 4;
  codes.group_stride = args.sealed_key.scales_row_stride;
  codes.scale_lane_stride = size_of(args.sealed_key.scale_type);
  return codes;
}

AffineCodes value_codes(const SealArgs& args, const SealedPair& pair) {
  AffineCodes codes = block_codes(args.value, args.sealed_value, pair);
  codes.num_entries = args.value.dim;
  codes.num_lanes = args.value.block_size;
  codes.entry_stride = size_of(args.value.type);
  codes.lane_stride = args.value.token_stride;
  codes.word_stride = 4;
  codes.word_lane_stride = args.sealed_value.row_stride;
  codes.group_stride = args.sealed_value.group_stride;
  codes.scale_lane_stride = args.sealed_value.scales_row_stride;
  return codes;
}

// The pairs, checked.
std::vector<SealedPair> sealed_pairs(const SealArgs& args) {
  std::vector<CopyRun> runs;
  const int64_t sources = std::min(args.key.num_blocks, args.value.num_blocks);
  list_pairs(args.sources, args.targets, sources, args.num_sealed, args.lowest, runs);
  std::vector<SealedPair> pairs;
  for (const CopyRun& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) pairs.push_back({run.source + i, run.target + i});
  }
  std::vector<int64_t> targets;
  for (const SealedPair& pair : pairs) targets.push_back(pair.target);
  std::sort(targets.begin(), targets.end());
  const auto twice = std::adjacent_find(targets.begin(), targets.end());
  PC_EXPECTS(twice == targets.end(), InvalidBlock, "pairs has sealed block ", *twice, " twice; seal each block once");
  return pairs;
}

}  // namespace

void check_sealed_pairs(const SealArgs& args) { static_cast<void>(sealed_pairs(args)); }

void seal_blocks(const SealArgs& args, int64_t num_threads) {
  const std::vector<SealedPair> pairs = sealed_pairs(args);
  const double numbers = static_cast<double>(args.key.block_size * args.key.num_heads) *
                         static_cast<double>(args.key.dim + args.value.dim) * static_cast<double>(pairs.size());
  num_threads =
      std::min(worthwhile_threads(numbers / kSealedPerUs, num_threads), std::max<int64_t>(1, std::ssize(pairs)));
  parallel_for(std::ssize(pairs), num_threads, [&](int64_t i, int64_t) noexcept {
    const SealedPair& pair = pairs[static_cast<size_t>(i)];
    quantize_affine(key_codes(args, pair), 1);
    quantize_affine(value_codes(args, pair), 1);
  });
}

}  // namespace pagecore::cpu
