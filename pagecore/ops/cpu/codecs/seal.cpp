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

// The codes of a plain block and a sealed one, from those of block 0 of both sides.
AffineCodes at_blocks(AffineCodes codes, const Cache& cache, const SealedPlane& plane, int64_t plain, int64_t sealed) {
  codes.numbers += plain * cache.block_stride;
  codes.words += sealed * plane.block_stride;
  codes.scales += sealed * plane.scales_block_stride;
  return codes;
}

// The pairs, checked.
std::vector<SealedPair> sealed_pairs(const SealArgs& args, bool restores) {
  std::vector<CopyRun> runs;
  const int64_t plain = std::min(args.key.num_blocks, args.value.num_blocks);
  list_pairs(args.sources, args.targets, restores ? args.num_sealed : plain, restores ? plain : args.num_sealed,
             args.lowest, runs);
  std::vector<SealedPair> pairs;
  for (const CopyRun& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) pairs.push_back({run.source + i, run.target + i});
  }
  std::vector<int64_t> targets;
  for (const SealedPair& pair : pairs) targets.push_back(pair.target);
  std::sort(targets.begin(), targets.end());
  const auto twice = std::adjacent_find(targets.begin(), targets.end());
  PC_EXPECTS(twice == targets.end(), InvalidBlock, "pairs has ", restores ? "plain" : "sealed", " block ", *twice,
             " twice; ", restores ? "write" : "seal", " each block once");
  return pairs;
}

void convert_sealed_blocks(const SealArgs& args, bool restores, int64_t num_threads) {
  const std::vector<SealedPair> pairs = sealed_pairs(args, restores);
  const double numbers = static_cast<double>(args.key.block_size * args.key.num_heads) *
                         static_cast<double>(args.key.dim + args.value.dim) * static_cast<double>(pairs.size());
  num_threads =
      std::min(worthwhile_threads(numbers / kSealedPerUs, num_threads), std::max<int64_t>(1, std::ssize(pairs)));
  const AffineCodes keys = key_codes(args.key, args.sealed_key), values = value_codes(args.value, args.sealed_value);
  const auto convert = restores ? dequantize_affine : quantize_affine;
  parallel_for(std::ssize(pairs), num_threads, [&](int64_t i, int64_t) noexcept {
    const SealedPair& pair = pairs[static_cast<size_t>(i)];
    const int64_t plain = restores ? pair.target : pair.source, sealed = restores ? pair.source : pair.target;
    convert(at_blocks(keys, args.key, args.sealed_key, plain, sealed), 1);
    convert(at_blocks(values, args.value, args.sealed_value, plain, sealed), 1);
  });
}

}  // namespace

void check_sealed_pairs(const SealArgs& args, bool restores) { static_cast<void>(sealed_pairs(args, restores)); }

void seal_blocks(const SealArgs& args, int64_t num_threads) { convert_sealed_blocks(args, false, num_threads); }

void unseal_blocks(const SealArgs& args, int64_t num_threads) { convert_sealed_blocks(args, true, num_threads); }

}  // namespace pagecore::cpu
