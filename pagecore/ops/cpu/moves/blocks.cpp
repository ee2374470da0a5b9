// Copies of blocks within caches.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/moves.hpp"
#include "pagecore/ops/cpu/moves/stream_copies.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

struct BlockAxis {
  int64_t size;
  int64_t stride;
};

// The axes of one block, longest stride first, with contiguous axes merged into runs of bytes.
class BlockShape {
 public:
  explicit BlockShape(const BlockArray& array) : run_bytes_(array.itemsize) {
    for (int i = 0; i < array.ndim; ++i) {
      if (array.shape[i] == 0) empty_ = true;
      if (array.shape[i] != 1) insert({array.shape[i], array.strides[i]});
    }
    while (count_ > 0 && axes_[count_ - 1].stride == run_bytes_) run_bytes_ *= axes_[--count_].size;
  }

  // Copies part `part` of `num_parts` equal parts of a block; all blocks are divided alike.
  void copy(const char* source, char* target, int64_t part, int64_t num_parts) const {
    if (empty_) return;
    const bool is_one_run = count_ == 0;
    const int64_t size = is_one_run ? run_bytes_ : axes_[0].size, stride = is_one_run ? 1 : axes_[0].stride;
    const int64_t begin = size * part / num_parts, end = size * (part + 1) / num_parts;
    if (is_one_run) {
      std::memmove(target + begin, source + begin, static_cast<size_t>(end - begin));
      return;
    }
    for (int64_t i = begin; i < end; ++i) copy_axis(source + i * stride, target + i * stride, 1);
  }

  [[nodiscard]] int64_t bytes() const {
    int64_t total = empty_ ? 0 : run_bytes_;
    for (size_t i = 0; i < count_; ++i) total *= axes_[i].size;
    return total;
  }

 private:
  void insert(const BlockAxis& axis) {
    size_t at = count_++;
    for (; at > 0 && std::llabs(axes_[at - 1].stride) < std::llabs(axis.stride); --at) axes_[at] = axes_[at - 1];
    axes_[at] = axis;
  }

  void copy_axis(const char* source, char* target, size_t depth) const {
    if (depth == count_) {
      std::memmove(target, source, static_cast<size_t>(run_bytes_));
      return;
    }
    const BlockAxis& axis = axes_[depth];
    for (int64_t i = 0; i < axis.size; ++i) copy_axis(source + i * axis.stride, target + i * axis.stride, depth + 1);
  }

  std::array<BlockAxis, 8> axes_{};
  size_t count_ = 0;
  int64_t run_bytes_;
  bool empty_ = false;
};

// Reads each id once: the checked ids are the ones used, even if the copies overwrite the memory of the ids.
std::vector<int64_t> read_ids(const Indices& ids) {
  std::vector<int64_t> values(static_cast<size_t>(ids.size));
  for (int64_t i = 0; i < ids.size; ++i) values[static_cast<size_t>(i)] = ids.at(i);
  return values;
}

void check_ids(const BlockArray& array, const std::vector<int64_t>& ids, const char* what, size_t which) {
  for (size_t i = 0; i < ids.size(); ++i) {
    PC_EXPECTS(ids[i] >= 0 && ids[i] < array.num_blocks, InvalidBlock, what, " of pair ", i, " is ", ids[i],
               " and cache ", which, " has ", array.num_blocks, " blocks");
  }
}

// A pair and the block that it writes.
struct Written {
  int64_t block;
  size_t pair;

  bool operator<(const Written& other) const { return block != other.block ? block < other.block : pair < other.pair; }
};

// Lists the pairs of different blocks; returns false if a block is written twice, or both read and written.
bool list_independent(const std::vector<int64_t>& sources, const std::vector<int64_t>& targets,
                      std::vector<CopyRun>& out) {
  std::vector<int64_t> written;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == targets[i]) continue;
    out.push_back({sources[i], targets[i], 1});
    written.push_back(targets[i]);
  }
  std::sort(written.begin(), written.end());
  if (std::adjacent_find(written.begin(), written.end()) != written.end()) return false;
  return std::none_of(out.begin(), out.end(), [&](const CopyRun& run) {
    return std::binary_search(written.begin(), written.end(), run.source);
  });
}

}  // namespace

void check_independent(const Indices& source_ids, const Indices& target_ids, bool one_cache) {
  const std::vector<int64_t> sources = read_ids(source_ids), targets = read_ids(target_ids);
  const auto counts = [&](size_t pair) { return !one_cache || sources[pair] != targets[pair]; };
  std::vector<Written> written;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (counts(i)) written.push_back({targets[i], i});
  }
  std::sort(written.begin(), written.end());
  constexpr const char* kRemedy = "; leave independent out to copy pairs in order";
  for (size_t i = 1; i < written.size(); ++i) {
    PC_EXPECTS(written[i].block != written[i - 1].block, UnsupportedOption, "independent is True, and pairs ",
               written[i - 1].pair, " and ", written[i].pair, " both write block ", written[i].block, kRemedy);
  }
  for (size_t i = 0; one_cache && i < sources.size(); ++i) {
    const auto found = std::lower_bound(written.begin(), written.end(), Written{sources[i], 0});
    const bool is_written = counts(i) && found != written.end() && found->block == sources[i];
    PC_EXPECTS(!is_written, UnsupportedOption, "independent is True, and pair ", i, " reads block ", sources[i],
               ", which pair ", found->pair, " writes", kRemedy);
  }
}

void check_copied(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    check_ids(arrays[i], read_ids(sources), "the source", i);
    check_ids(arrays[i], read_ids(targets), "the target", i);
  }
}

void copy_blocks(const std::vector<BlockArray>& arrays, const Indices& source_ids, const Indices& target_ids,
                 int64_t num_threads) {
  static_cast<void>(kernels());  // raises for an unknown instruction set, which units of work cannot
  const std::vector<int64_t> sources = read_ids(source_ids), targets = read_ids(target_ids);
  std::vector<BlockShape> shapes;
  int64_t bytes = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    check_ids(arrays[i], sources, "the source", i);
    check_ids(arrays[i], targets, "the target", i);
    shapes.emplace_back(arrays[i]);
    bytes += shapes.back().bytes() * std::ssize(sources);
  }
  // A later pair reads what earlier pairs wrote, so each thread copies its part of every block through all pairs in
  // order.
  num_threads = threads_to_move(bytes, num_threads);
  std::vector<CopyRun> runs;
  const bool streams = bytes > l2_bytes() && list_independent(sources, targets, runs);
  parallel_for(num_threads, num_threads, [&](int64_t part, int64_t) noexcept {
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (streams) {
        stream_copies(arrays[i], runs, part, num_threads);
        continue;
      }
      const auto block = [&](int64_t id) { return arrays[i].data + id * arrays[i].block_stride; };
      for (size_t pair = 0; pair < sources.size(); ++pair) {
        if (sources[pair] == targets[pair]) continue;
        shapes[i].copy(block(sources[pair]), block(targets[pair]), part, num_threads);
      }
    }
  });
}

}  // namespace pagecore::cpu
