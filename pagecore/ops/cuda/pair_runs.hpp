// Pairs of blocks, and their partition into runs that are copied in parallel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

// Pairs on the host, or two columns of `size` in device memory.
struct BlockPairs {
  std::vector<int64_t> sources;
  std::vector<int64_t> targets;
  const char* on_device = nullptr;
  int64_t size = 0;
  int64_t pair_stride = 0;  // elements
  int64_t column_stride = 0;
  bool wide = false;
  bool independent = false;  // the caller claims that pairs on the device may run in any order
  int32_t lowest = 0;        // lowest valid block: 1 excludes the null block
};

// Read pairs on the host. With `one_cache`, pairs that copy a block to itself are dropped.
[[nodiscard]] inline BlockPairs host_pairs(const Indices& sources, const Indices& targets, bool one_cache) {
  BlockPairs pairs;
  for (int64_t i = 0; i < sources.size; ++i) {
    const int64_t source = sources.at(i), target = targets.at(i);
    if (one_cache && source == target) continue;
    pairs.sources.push_back(source);
    pairs.targets.push_back(target);
  }
  return pairs;
}

// Describe pairs on the device, which are not read: `independent` is the caller's claim.
[[nodiscard]] inline BlockPairs device_pairs(const Indices& sources, const Indices& targets, bool independent) {
  const int64_t size = index_size(sources.wide);
  BlockPairs pairs;
  pairs.on_device = sources.data;
  pairs.size = sources.size;
  pairs.pair_stride = sources.stride / size;
  pairs.column_stride = (targets.data - sources.data) / size;
  pairs.wide = sources.wide;
  pairs.independent = independent;
  return pairs;
}

// Pairs begin .. end - 1 for one launch. `ordered`: a pair reads what earlier pairs wrote.
struct PairRun {
  int64_t begin = 0;
  int64_t end = 0;
  bool ordered = false;
};

// Partition pairs on the host into waves: no pair of a wave reads or writes a block that another pair of it writes.
// With `one_cache`, sources and targets are blocks of the same arrays. If waves are short on average, the runs are
// instead as long as a launch allows, and ordered.
[[nodiscard]] inline std::vector<PairRun> runs_of(const BlockPairs& pairs, bool one_cache) {
  constexpr int64_t kShort = 8;
  struct Wave {
    size_t read = 0;     // number of the last wave that read the block, from 1 on
    size_t written = 0;  // number of the last wave that wrote it
  };
  const int64_t count = std::ssize(pairs.sources);
  std::unordered_map<int64_t, Wave> blocks;
  std::vector<PairRun> runs;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = pairs.sources[static_cast<size_t>(i)], target = pairs.targets[static_cast<size_t>(i)];
    const size_t now = runs.size();
    bool cut = runs.empty() || i - runs.back().begin == PC_MAX_PAIRS || blocks[target].written == now;
    if (one_cache) cut = cut || blocks[target].read == now || blocks[source].written == now;
    if (cut) runs.push_back({i, i, false});
    runs.back().end = i + 1;
    blocks[target].written = runs.size();
    if (one_cache) blocks[source].read = runs.size();
  }
  if (std::ssize(runs) <= 2 || count >= kShort * std::ssize(runs)) return runs;
  runs.clear();
  for (int64_t i = 0; i < count; i += PC_MAX_PAIRS) {
    runs.push_back({i, std::min<int64_t>(i + PC_MAX_PAIRS, count), true});
  }
  return runs;
}

// Set the pairs of one launch in the parameters of a kernel that moves or converts blocks.
template <typename Params>
void set_pairs(Params& params, const BlockPairs& pairs, const PairRun& run) {
  params.num_pairs = static_cast<pc_int32>(run.end - run.begin);
  if (pairs.on_device != nullptr) {
    params.on_device = address_of(pairs.on_device);
    params.pair_stride = pairs.pair_stride;
    params.column_stride = pairs.column_stride;
    params.wide = pairs.wide;
    return;
  }
  for (int64_t i = run.begin; i < run.end; ++i) {
    params.pairs[i - run.begin][0] = static_cast<pc_int32>(pairs.sources[static_cast<size_t>(i)]);
    params.pairs[i - run.begin][1] = static_cast<pc_int32>(pairs.targets[static_cast<size_t>(i)]);
  }
}

}  // namespace pagecore::cuda
