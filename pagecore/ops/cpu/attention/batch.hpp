// Checks of a batch's index arrays, and their conversion to int32 for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu {

// Buffers grow and never shrink, so that a warm call allocates nothing.
class CheckedBatch {
 public:
  // Raises before anything is written if lengths or offsets are inconsistent, rows are outside the table, or blocks are
  // outside the cache. Only blocks that some query attends to are checked.
  void check(const AttentionArgs& args);

  // check() without the blocks of the table.
  void check_lists(const AttentionArgs& args);

  // Raises ShapeError unless the plan was made for this batch and these options.
  void check_plan(const AttentionArgs& args, const PlanView& plan) const;

  [[nodiscard]] int64_t num_sequences() const { return num_sequences_; }
  [[nodiscard]] int64_t num_queries() const { return cu_query_lens_[static_cast<size_t>(num_sequences_)]; }
  [[nodiscard]] const int32_t* cu_query_lens() const { return cu_query_lens_.data(); }
  [[nodiscard]] const int32_t* seq_lens() const { return seq_lens_.data(); }
  [[nodiscard]] const int32_t* rows() const { return rows_.data(); }
  [[nodiscard]] const int64_t* mask_starts() const { return mask_starts_.data(); }
  // Tokens of each sequence in sealed blocks; null without any.
  [[nodiscard]] const int32_t* sealed_lens() const { return has_sealed_ ? sealed_lens_.data() : nullptr; }
  // Position of each token of a tree; null without one.
  [[nodiscard]] const int32_t* tree_positions() const { return has_tree_ ? tree_positions_.data() : nullptr; }
  // [sequence, key head, width] and [sequence, key head]; null without a selection.
  [[nodiscard]] const int32_t* selected() const { return has_selection_ ? selected_.data() : nullptr; }
  [[nodiscard]] const int32_t* selected_counts() const { return has_selection_ ? selected_counts_.data() : nullptr; }
  // Keys that an item of each sequence can have: those of the head that selects most, or all.
  [[nodiscard]] const int32_t* num_keys() const { return has_selection_ ? num_keys_.data() : seq_lens_.data(); }

 private:
  // The row of the table that has the token at a position, and the number of blocks of its cache.
  struct BlockList {
    Indices blocks;
    int64_t limit;
    const char* name;
  };

  [[nodiscard]] BlockList blocks_of(const AttentionArgs& args, int64_t sequence, int64_t position) const;
  void check_queries(const AttentionArgs& args);
  void check_lengths(const AttentionArgs& args);
  void check_rows(const AttentionArgs& args);
  void check_sealed(const AttentionArgs& args);
  void check_mask(const AttentionArgs& args);
  void check_tree(const AttentionArgs& args);
  void check_tree_token(const AttentionArgs& args, int64_t sequence, int64_t index);
  void check_selection(const AttentionArgs& args);
  void check_selected(const AttentionArgs& args, int64_t sequence, int64_t head);
  void check_blocks(const AttentionArgs& args, int64_t sequence) const;
  void check_range(const AttentionArgs& args, int64_t sequence, const KeyRange& keys) const;
  void check_selected_blocks(const AttentionArgs& args, int64_t sequence, const KeyRange& keys) const;
  [[nodiscard]] bool attended(const AttentionArgs& args, int64_t sequence, int64_t begin, int64_t end) const;

  int64_t num_sequences_ = 0;
  std::vector<int32_t> cu_query_lens_;
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> rows_;
  bool has_sealed_ = false;
  std::vector<int32_t> sealed_lens_;
  std::vector<int64_t> mask_starts_;
  bool has_tree_ = false;
  std::vector<int32_t> tree_positions_;
  bool has_selection_ = false;
  std::vector<int32_t> selected_;
  std::vector<int32_t> selected_counts_;
  std::vector<int32_t> num_keys_;
};

}  // namespace pagecore::cpu
