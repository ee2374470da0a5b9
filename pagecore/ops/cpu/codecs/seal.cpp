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

// The codes of a pair, from those of block 0 of both sides.
AffineCodes at_pair(AffineCodes codes, const Cache& cache, const SealedPlane& plane, const SealedPair& pair) {
  codes.numbers += pair.source * cache.block_stride;
  codes.words += pair.target * plane.block_stride;
  codes.scales += pair.target * plane.scales_block_stride;
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
  const AffineCodes keys = key_codes(args.key, args.sealed_key), values = value_codes(args.value, args.sealed_value);
  parallel_for(std::ssize(pairs), num_threads, [&](int64_t i, int64_t) noexcept {
    const SealedPair& pair = pairs[static_cast<size_t>(i)];
    quantize_affine(at_pair(keys, args.key, args.sealed_key, pair), 1);
    quantize_affine(at_pair(values, args.value, args.sealed_value, pair), 1);
  });
}

}  // namespace pagecore::cpu
