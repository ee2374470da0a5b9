// Runs: the tokens, block ids and marks of nodes. A node is a slice of a run; a split makes two slices and copies none.
//
//   run   [ tokens of every block | ids of lane 0 | ids of lane 1 | ... ]
//
// It has room for `capacity` blocks, of which `live` are in slices.
//
// A lane is one id for each block: the lanes of the full component come first, then one lane for each window, in which
// the null block is a hole.
// I1: slices of one run do not overlap, and stand in the order of their list; live is the sum of their sizes.
//     They lie on one path, the top one first: a leaf is the last slice, and may grow into the room behind it.
// I2: 2 * capacity <= 3 * live (except where memory ran out while compacting); a run without slices is gone.
// Memory: (block_size + lanes) * 4 bytes a block. Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "pagecore/index/radix_key.hpp"

namespace pagecore::radix {

using RunId = int32_t;

struct Run {
  std::unique_ptr<int32_t[]> data;
  std::vector<Mark> marks;  // blocks counted from the start of the run
  int32_t capacity = 0;
  int32_t live = 0;
  NodeId first = kNoNode;  // head of the list of slices
};

struct Slice {
  int32_t start;
  int32_t size;
};

class Runs {
 public:
  Runs(int64_t block_size, int32_t lanes) : block_size_(block_size), lanes_(lanes) {}

  // Room to add `count` runs: add cannot fail then.
  void reserve(size_t count = 1) {
    if (free_.size() >= count) return;
    const size_t wanted = runs_.size() + count - free_.size();
    if (wanted > runs_.capacity()) runs_.reserve(std::max(wanted, runs_.size() * 2 + 16));
    free_.reserve(runs_.capacity());
  }
  [[nodiscard]] RunId add(Run&& run) noexcept {
    held_blocks_ += run.capacity;
    held_marks_ += run.marks.capacity();
    if (free_.empty()) {
      runs_.push_back(std::move(run));
      return static_cast<RunId>(runs_.size() - 1);
    }
    const RunId id = free_.back();
    free_.pop_back();
    runs_[static_cast<size_t>(id)] = std::move(run);
    return id;
  }
  void remove(RunId id) noexcept {
    Run& run = runs_[static_cast<size_t>(id)];
    held_blocks_ -= run.capacity;
    held_marks_ -= run.marks.capacity();
    run = Run{};
    free_.push_back(id);
  }

  // A run of `count` blocks, not yet added, with the tokens and marks of the query from block `first` on.
  // `spare`, where there is one, is a run of the query's blocks from `first` or before it on: where memory is short,
  // its own serves.
  [[nodiscard]] Run make(const Query& query, int64_t first, int64_t count, Run* spare = nullptr) const {
    if (spare != nullptr && spare->capacity == count) return std::move(*spare);
    Run run;
    try {
      run.data = std::make_unique_for_overwrite<int32_t[]>(words(count));
      run.marks.reserve(
          static_cast<size_t>(first_mark_from(query.marks, first + count) - first_mark_from(query.marks, first)));
    } catch (const std::bad_alloc&) {
      if (spare == nullptr) throw;
      run = std::move(*spare);
    }
    run.capacity = run.live = static_cast<int32_t>(count);
    std::copy_n(query.tokens.data() + first * block_size_, count * block_size_, run.data.get());
    const Mark* const begin = first_mark_from(query.marks, first);
    run.marks.assign(begin, first_mark_from(query.marks, first + count));
    for (Mark& mark : run.marks) mark.block -= static_cast<int32_t>(first);
    return run;
  }

  [[nodiscard]] Run& operator[](RunId id) { return runs_[static_cast<size_t>(id)]; }
  [[nodiscard]] const Run& operator[](RunId id) const { return runs_[static_cast<size_t>(id)]; }
  [[nodiscard]] const int32_t* tokens(RunId id, int64_t block) const {
    return (*this)[id].data.get() + block * block_size_;
  }
  [[nodiscard]] int32_t* lane(Run& run, int32_t lane) const {
    return run.data.get() + run.capacity * (block_size_ + lane);
  }
  [[nodiscard]] const int32_t* lane(const Run& run, int32_t lane) const {
    return run.data.get() + run.capacity * (block_size_ + lane);
  }
  [[nodiscard]] static bool is_sparse(const Run& run) { return int64_t{run.live} * 3 < int64_t{run.capacity} * 2; }

  // Moves the slices, which are in order, to the front of a run of `capacity` blocks, and says where they stand now.
  void resize(RunId id, std::span<Slice> slices, int32_t capacity) {
    Run& old = (*this)[id];
    Run run;
    run.capacity = capacity;
    run.live = old.live;
    run.first = old.first;
    run.data = std::make_unique_for_overwrite<int32_t[]>(words(capacity));
    int32_t size = 0;
    for (Slice& slice : slices) size += move(old, run, slice, size);
    held_blocks_ += run.capacity - old.capacity;
    held_marks_ += run.marks.capacity() - old.marks.capacity();
    old = std::move(run);
  }
  // Leaves no room; returns false, having changed nothing, where memory is short.
  [[nodiscard]] bool compact(RunId id, std::span<Slice> slices) noexcept {
    try {
      resize(id, slices, (*this)[id].live);
    } catch (const std::bad_alloc&) {
      was_memory_short_ = true;
      return false;
    }
    return true;
  }

  // Gives the runs the lowest ids, and says which: `renumber(first slice, id)`.
  template <typename Renumber>
  void pack(Renumber&& renumber) {
    std::vector<Run> runs;
    runs.reserve(size() + size() / 2 + 16);
    std::vector<RunId> free;
    free.reserve(runs.capacity());
    for (Run& run : runs_) {
      if (run.live == 0) continue;
      renumber(run.first, static_cast<RunId>(runs.size()));
      runs.push_back(std::move(run));
    }
    runs_.swap(runs);
    free_.swap(free);
  }

  // Whether a compaction has ever failed, so that I2 may not hold.
  [[nodiscard]] bool was_memory_short() const { return was_memory_short_; }
  [[nodiscard]] int64_t held_blocks() const { return held_blocks_; }
  [[nodiscard]] size_t size() const { return runs_.size() - free_.size(); }
  [[nodiscard]] size_t nbytes() const {
    return words(held_blocks_) * sizeof(int32_t) + held_marks_ * sizeof(Mark) + runs_.capacity() * sizeof(Run) +
           free_.capacity() * sizeof(RunId);
  }

 private:
  [[nodiscard]] size_t words(int64_t blocks) const { return static_cast<size_t>(blocks * (block_size_ + lanes_)); }

  int32_t move(const Run& from, Run& to, Slice& slice, int32_t start) const {
    std::copy_n(from.data.get() + slice.start * block_size_, slice.size * block_size_,
                to.data.get() + start * block_size_);
    for (int32_t i = 0; i < lanes_; ++i) std::copy_n(lane(from, i) + slice.start, slice.size, lane(to, i) + start);
    const Mark* const end = first_mark_from(from.marks, int64_t{slice.start} + slice.size);
    for (const Mark* mark = first_mark_from(from.marks, slice.start); mark != end; ++mark) {
      to.marks.push_back(*mark);
      to.marks.back().block += start - slice.start;
    }
    slice.start = start;
    return slice.size;
  }

  int64_t block_size_;
  int32_t lanes_;
  int64_t held_blocks_ = 0;
  size_t held_marks_ = 0;
  bool was_memory_short_ = false;
  std::vector<Run> runs_;
  std::vector<RunId> free_;
};

}  // namespace pagecore::radix
