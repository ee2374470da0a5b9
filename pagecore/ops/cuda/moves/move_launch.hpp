// Launches of move_pairs and move_sequences for copies between arrays of blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/cuda/moves/move_shape.hpp"
#include "pagecore/ops/cuda/pair_runs.hpp"

namespace pagecore::cuda {

struct PairLaunch {
  PcPairParams params = {};
  MoveTypes types;
  Grid grid;
};

struct SequenceLaunch {
  PcSequenceParams params = {};
  MoveTypes types;
  Grid grid;
};

// Sequences to copy between paged caches and their packed arrays.
struct SequenceBatch {
  Table table;
  Indices seq_lens;
  Indices rows;
  int64_t num_tokens = 0;  // in a packed array
  int64_t longest = 0;     // upper bound of the tokens of a sequence
  bool gathers = true;
  int32_t lowest = 1;  // blocks below are holes
};

namespace internal {

// Addresses of the arrays with one plan.
struct MoveGroup {
  MovePlan plan;
  std::vector<pc_address> sources;
  std::vector<pc_address> targets;
};

// Arrays begin .. begin + size - 1 of a group, for one launch.
struct MoveShare {
  const MoveGroup* group;
  int64_t begin;
  int64_t size;
};

inline bool has_empty_axis(const BlockArray& array) {
  return std::find(array.shape, array.shape + array.ndim, 0) != array.shape + array.ndim;
}

inline void add_to_groups(std::vector<MoveGroup>& groups, const MovePlan& plan, const BlockArray& source,
                          const BlockArray& target) {
  auto group = std::find_if(groups.begin(), groups.end(), [&](const MoveGroup& each) { return each.plan == plan; });
  if (group == groups.end()) group = groups.insert(groups.end(), {plan, {}, {}});
  group->sources.push_back(address_of(source.data));
  group->targets.push_back(address_of(target.data));
}

inline std::vector<MoveShare> shares_of(const std::vector<MoveGroup>& groups) {
  std::vector<MoveShare> shares;
  for (const MoveGroup& group : groups) {
    const int64_t count = std::ssize(group.sources);
    for (int64_t i = 0; i < count; i += PC_MAX_ARRAYS) {
      shares.push_back({&group, i, std::min<int64_t>(count - i, PC_MAX_ARRAYS)});
    }
  }
  return shares;
}

inline void set_addresses(const MoveShare& share, pc_address* sources, pc_address* targets) {
  std::copy_n(share.group->sources.begin() + share.begin, share.size, sources);
  std::copy_n(share.group->targets.begin() + share.begin, share.size, targets);
}

inline pc_int32 fewest_blocks(const std::vector<BlockArray>& arrays) {
  int64_t fewest = INT32_MAX;
  for (const BlockArray& array : arrays) fewest = std::min(fewest, array.num_blocks);
  return static_cast<pc_int32>(fewest);
}

}  // namespace internal

// Launches that copy blocks of each source to blocks of the target with the same index. `one_cache`: sources and
// targets are the same arrays. Pairs on the host have been checked. Pairs on the device take one launch: independent
// pairs are distributed over the grid; otherwise each thread moves the same bytes of all pairs, in order.
[[nodiscard]] inline std::vector<PairLaunch> pair_launches(const std::vector<BlockArray>& sources,
                                                           const std::vector<BlockArray>& targets,
                                                           const BlockPairs& pairs, bool one_cache,
                                                           int64_t num_multiprocessors) {
  PC_EXPECTS(pairs.size <= INT32_MAX, ShapeError, "pairs holds ", pairs.size, " pairs on the device; at most ",
             INT32_MAX, " are supported: split the call");
  std::vector<internal::MoveGroup> groups;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (internal::has_empty_axis(sources[i])) continue;
    internal::add_to_groups(groups, plan_blocks(sources[i], targets[i]), sources[i], targets[i]);
  }
  std::vector<PairRun> runs = runs_of(pairs, one_cache);
  if (pairs.on_device != nullptr && pairs.size > 0) runs.push_back({0, pairs.size, !pairs.independent});
  std::vector<PairLaunch> launches;
  for (const internal::MoveShare& share : internal::shares_of(groups)) {
    for (const PairRun& run : runs) {
      PairLaunch& launch = launches.emplace_back();
      PcPairParams& params = launch.params;
      params.shape = share.group->plan.shape;
      params.source_block_stride = share.group->plan.source_block_stride;
      params.target_block_stride = share.group->plan.target_block_stride;
      params.lowest = pairs.lowest;
      params.num_source_blocks = internal::fewest_blocks(sources);
      params.num_target_blocks = internal::fewest_blocks(targets);
      set_pairs(params, pairs, run);
      params.ordered = run.ordered;
      internal::set_addresses(share, params.sources, params.targets);
      params.one_cache = one_cache;
      const int64_t units = params.shape.num_units, parallel = run.ordered ? 1 : run.end - run.begin;
      const int64_t enough = std::min<int64_t>(parallel, kResident);  // keeps the product below 2^63
      const int64_t each = units_per_thread(units * share.size * enough, num_multiprocessors);
      const int64_t stretches = ceil_div(units, kThreads * each);
      params.units_per_thread = static_cast<pc_int32>(each);
      launch.types = share.group->plan.types;
      launch.grid = {stretches, grid_rows(parallel, stretches * share.size), share.size};
    }
  }
  return launches;
}

[[nodiscard]] inline std::vector<SequenceLaunch> sequence_launches(const std::vector<BlockArray>& caches,
                                                                   const std::vector<BlockArray>& packed,
                                                                   const SequenceBatch& batch) {
  PC_EXPECTS(batch.seq_lens.size <= INT32_MAX, ShapeError, "seq_lens holds ", batch.seq_lens.size,
             " sequences; on CUDA at most ", INT32_MAX, " are supported: split the call");
  std::vector<internal::MoveGroup> groups;
  for (size_t i = 0; i < caches.size(); ++i) {
    if (internal::has_empty_axis(caches[i])) continue;
    const MovePlan plan = plan_tokens(caches[i], packed[i], batch.gathers);
    internal::add_to_groups(groups, plan, batch.gathers ? caches[i] : packed[i], batch.gathers ? packed[i] : caches[i]);
  }
  std::vector<SequenceLaunch> launches;
  const int64_t sequences = batch.seq_lens.size;
  for (const internal::MoveShare& share : internal::shares_of(groups)) {
    const int64_t size = caches[0].shape[0], blocks = std::min(ceil_div(batch.longest, size), batch.table.width);
    if (sequences == 0 || blocks == 0 || batch.num_tokens == 0) break;
    SequenceLaunch& launch = launches.emplace_back();
    PcSequenceParams& params = launch.params;
    const MovePlan& plan = share.group->plan;
    params.shape = plan.shape;
    params.block_stride = batch.gathers ? plan.source_block_stride : plan.target_block_stride;
    params.token_stride = batch.gathers ? plan.target_block_stride : plan.source_block_stride;
    params.table = device_table(batch.table);
    params.rows = device_indices(batch.rows);
    params.seq_lens = device_indices(batch.seq_lens);
    params.num_tokens = batch.num_tokens;
    params.num_blocks = internal::fewest_blocks(caches);
    params.block_size = static_cast<pc_int32>(size);
    params.gathers = batch.gathers;
    params.lowest = batch.lowest;
    internal::set_addresses(share, batch.gathers ? params.caches : params.packed,
                            batch.gathers ? params.packed : params.caches);
    launch.types = plan.types;
    launch.grid = {sequences, grid_rows(blocks, sequences), share.size};
  }
  return launches;
}

}  // namespace pagecore::cuda
