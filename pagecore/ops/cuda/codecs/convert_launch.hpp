// Launches of the kernels that convert stored rows between formats.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_src/abi/convert.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/latent/latent_row_launch.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/cuda/moves/write_launch.hpp"
#include "pagecore/ops/cuda/pair_runs.hpp"

namespace pagecore::cuda {

// Two caches with equal block sizes, heads and dims. Factors are given ones.
struct ConvertArgs {
  Cache source;
  Cache target;
  Divisors source_factors;
  Divisors target_factors;
  bool is_4over6 = false;
};

// Two latent caches with equal block sizes, whose rows have 512 latent and 64 rope numbers.
struct LatentConvertArgs {
  LatentPlaneArgs source;
  LatentPlaneArgs target;
  float source_factor = 1.0f;
  float target_factor = 1.0f;
};

// Pairs of blocks of a call, or every block of both sides if `identity` is not 0: the number of blocks.
struct ConvertBlocks {
  BlockPairs pairs;
  int64_t identity = 0;
  int64_t num_source_blocks = 0;
  int64_t num_target_blocks = 0;
};

struct ConvertLaunch {
  PcConvertParams params = {};
  Grid grid;
};

struct LatentConvertLaunch {
  PcLatentConvertParams params = {};
  Grid grid;
};

namespace internal {

// Return true if 8 numbers or codes of every row can be moved at once.
inline bool moves_chunks(const Cache& cache) {
  const uint64_t bits =
      address_of(cache.data) | bits_of(cache.block_stride) | bits_of(cache.token_stride) | bits_of(cache.head_stride);
  return cache.dim % 8 == 0 && allows(bits, row_bytes(cache) * 8 / cache.dim);
}

inline std::vector<PairRun> convert_runs(const ConvertBlocks& blocks) {
  if (blocks.identity > 0) return {{0, blocks.identity, false}};
  if (blocks.pairs.on_device == nullptr) return runs_of(blocks.pairs, false);
  if (blocks.pairs.size == 0) return {};
  return {{0, blocks.pairs.size, !blocks.pairs.independent}};
}

inline void set_blocks(PcConvertPairs& params, const ConvertBlocks& blocks, const PairRun& run) {
  params.identity = blocks.identity > 0 ? 1 : 0;
  params.lowest = blocks.identity > 0 ? 0 : blocks.pairs.lowest;
  params.num_source_blocks = clamped(blocks.num_source_blocks);
  params.num_target_blocks = clamped(blocks.num_target_blocks);
  if (blocks.identity > 0) {
    params.num_pairs = static_cast<pc_int32>(blocks.identity);
  } else {
    set_pairs(params, blocks.pairs, run);
  }
}

// Append a launch for each run of pairs; `stretches` blocks of threads convert a pair.
template <typename Launch>
inline void add_convert_launches(std::vector<Launch>& launches, const ConvertBlocks& blocks, Launch launch,
                                 int64_t stretches) {
  PC_EXPECTS(std::max(blocks.pairs.size, blocks.identity) <= INT32_MAX, ShapeError, "a call converts ",
             std::max(blocks.pairs.size, blocks.identity), " blocks on the device; at most ", INT32_MAX,
             " are supported: split the call");
  for (const PairRun& run : convert_runs(blocks)) {
    set_blocks(launch.params.pairs, blocks, run);
    const int64_t parallel = run.ordered ? 1 : run.end - run.begin;
    launch.grid = {stretches, grid_rows(parallel, stretches), 1};
    launches.push_back(launch);
  }
}

}  // namespace internal

// Append the launches that convert blocks of two caches.
inline void add_launches(std::vector<ConvertLaunch>& launches, const ConvertArgs& args, const ConvertBlocks& blocks) {
  const Cache& source = args.source;
  if (source.block_size == 0 || source.num_heads == 0) return;
  ConvertLaunch launch;
  PcConvertParams& params = launch.params;
  params.source = device_stored(source);
  params.target = device_stored(args.target);
  params.source_factors = address_of(args.source_factors.data);
  params.target_factors = address_of(args.target_factors.data);
  params.source_factor = args.source_factors.for_all;
  params.target_factor = args.target_factors.for_all;
  params.source_factor_stride = static_cast<pc_int16>(args.source_factors.stride);
  params.target_factor_stride = static_cast<pc_int16>(args.target_factors.stride);
  const auto chunks = static_cast<uint64_t>(ceil_div(source.dim, 8));
  params.lanes_shift = std::min<pc_int32>(5, static_cast<pc_int32>(std::bit_width(chunks - 1)));
  PC_EXPECTS(source.dim < INT32_MAX / 2 && source.num_heads <= kMaxUnits / source.block_size >> params.lanes_shift,
             ShapeError, "a block has ", source.block_size, " tokens with ", source.num_heads, " heads of ", source.dim,
             "; on CUDA it must have fewer than ", kMaxUnits, " numbers: split the call");
  params.num_heads = make_divisor(source.num_heads);
  params.dim = clamped(source.dim);
  params.num_rows = static_cast<pc_int32>(source.block_size * source.num_heads);
  params.source_in_vectors = internal::moves_chunks(source) ? 1 : 0;
  params.target_in_vectors = internal::moves_chunks(args.target) ? 1 : 0;
  params.is_4over6 = args.is_4over6 ? 1 : 0;
  const int64_t threads = int64_t{params.num_rows} << params.lanes_shift;
  internal::add_convert_launches(launches, blocks, launch, ceil_div(threads, kThreads));
}

// Append the launches that convert blocks of two latent caches.
inline void add_launches(std::vector<LatentConvertLaunch>& launches, const LatentConvertArgs& args,
                         const ConvertBlocks& blocks) {
  LatentConvertLaunch launch;
  PcLatentConvertParams& params = launch.params;
  params.source = internal::latent_rows(args.source);
  params.target = internal::latent_rows(args.target);
  params.source_factor = args.source_factor;
  params.target_factor = args.target_factor;
  const int64_t tokens = args.source.latent.shape[0];
  PC_EXPECTS(tokens <= INT32_MAX - PC_LATENT_ROW_TOKENS, ShapeError, "a block has ", tokens,
             " tokens; on CUDA it must have fewer than 2^31: split the call");
  params.block_size = static_cast<pc_int32>(tokens);
  if (tokens > 0) internal::add_convert_launches(launches, blocks, launch, ceil_div(tokens, PC_LATENT_ROW_TOKENS));
}

}  // namespace pagecore::cuda
