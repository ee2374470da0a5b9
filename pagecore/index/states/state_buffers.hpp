// State slots of one forward pass: int32 arrays allocated once, at fixed addresses.
//
//   state_read          4  7  9 | 0  0      slot of the state before the new tokens
//   state_write         4  7  2 | 0  0      slot of the state after them
//   checkpoint_write    0  5  2 | 0  0      slot of the state after `checkpoint_lengths` tokens; 0: none
//   checkpoint_lengths  0 64 16 | 0  0      tokens of the sequence, counted from its start
//   zeros               4 | ...             slots to zero before the pass: the first num_zeros entries
//   copies              8 7 | ...           (source, target) to copy before the pass: the first num_copies pairs
//   draft_read          [sequence][token]   slot of the state before each token of a decode step, if there are drafts
//   draft_write         [sequence][token]   slot of the state after it
//   loads               3 7 | ...           (checkpoint, slot) to restore before the pass, if checkpoints are quantised
//   saves               7 4 | ...           (slot, checkpoint) to quantise after the pass; written when the step ends
//
// The arrays but the last two follow each other in one image, in this order, so that one copy moves all of them.
// I1: entries after the sequences of the last step, its zeros, copies, loads and saves are 0.
// Threads: the owner synchronises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/tables/pending_copies.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class StateBuffers {
 public:
  StateBuffers(int64_t max_sequences, int64_t draft_tokens);

  [[nodiscard]] int32_t max_sequences() const { return max_sequences_; }
  [[nodiscard]] int32_t draft_tokens() const { return draft_tokens_; }
  [[nodiscard]] int32_t num_sequences() const { return num_sequences_; }
  [[nodiscard]] int32_t num_zeros() const { return num_zeros_; }
  [[nodiscard]] int32_t num_copies() const { return num_copies_; }
  [[nodiscard]] int32_t num_loads() const { return num_loads_; }
  [[nodiscard]] int32_t num_saves() const { return num_saves_; }
  [[nodiscard]] size_t nbytes() const { return memory_.nbytes(); }
  [[nodiscard]] const int32_t* image() const { return state_read_; }
  [[nodiscard]] size_t image_nbytes() const { return image_size_ * sizeof(int32_t); }

  [[nodiscard]] BlockId* state_read() { return state_read_; }
  [[nodiscard]] BlockId* state_write() { return state_write_; }
  [[nodiscard]] BlockId* checkpoint_write() { return checkpoint_write_; }
  [[nodiscard]] TokenCount* checkpoint_lengths() { return checkpoint_lengths_; }
  [[nodiscard]] BlockId* zeros() { return zeros_; }
  [[nodiscard]] BlockCopy* copies() { return reinterpret_cast<BlockCopy*>(copies_); }
  [[nodiscard]] BlockCopy* loads() { return reinterpret_cast<BlockCopy*>(loads_); }
  [[nodiscard]] BlockCopy* saves() { return reinterpret_cast<BlockCopy*>(saves_); }
  // draft_tokens() + 1 entries of sequence i; null without drafts.
  [[nodiscard]] BlockId* draft_read(size_t i) { return draft_tokens_ > 0 ? draft_read_ + i * width() : nullptr; }
  [[nodiscard]] BlockId* draft_write(size_t i) { return draft_tokens_ > 0 ? draft_write_ + i * width() : nullptr; }

  // Begins a step, whose entries the caller writes; everything else becomes 0.
  void begin(int32_t num_sequences);
  // Turns the entries of sequences [first, last) into padding.
  void skip(int32_t first, int32_t last);
  void add_zero(BlockId slot) { zeros_[num_zeros_++] = slot; }
  void add_copy(BlockCopy copy) { copies()[num_copies_++] = copy; }
  void add_load(BlockCopy load) { loads()[num_loads_++] = load; }
  // Replaces the saves; at most max_sequences().
  void set_saves(const std::vector<BlockCopy>& saves);

  void check_invariants() const;

 private:
  [[nodiscard]] size_t width() const { return draft_tokens_ > 0 ? static_cast<size_t>(draft_tokens_) + 1 : 0; }

  int32_t max_sequences_;
  int32_t draft_tokens_;
  int32_t num_sequences_ = 0;
  int32_t num_zeros_ = 0;
  int32_t num_copies_ = 0;
  int32_t num_loads_ = 0;
  int32_t num_saves_ = 0;
  ZeroedArray<int32_t> memory_;
  size_t image_size_;
  BlockId* state_read_;
  BlockId* state_write_;
  BlockId* checkpoint_write_;
  TokenCount* checkpoint_lengths_;
  BlockId* zeros_;
  int32_t* copies_;
  BlockId* draft_read_;
  BlockId* draft_write_;
  int32_t* loads_;
  int32_t* saves_;
};

}  // namespace pagecore
