// Buffers of one forward pass: arrays allocated once, at fixed addresses.
//
//   rows            0  5  3 | N  N        N: the null row of the tables      num_sequences = 3, num_tokens = 6
//   query_lens      1  4  1 | 0  0
//   cu_query_lens   0  1  5  6 | 6  6
//   seq_lens        9  4 17 | 0  0        tokens after the step
//   positions       8  0  1  2  3 16 | 0  0 ...
//   token_ids      71  5  5  9  2 40 | 0  0 ...     written by the caller
//   tree_mask      rows of bits, [tokens, words]    written by the caller; not padded
//   sealed_lens     8  0 16 | 0  0        tokens in sealed blocks; written by the caller, absent by default
//   slots[group]   24 80 81 82 83 52 |-1 -1 ...
//
// The arrays follow each other in one image, in this order, so that one copy moves all of them.
// I1: entries after the sequences and tokens of the last step are padding, as drawn.
// Cost: a step writes its own entries and pads those that a longer step left. Threads: the owner synchronises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

inline constexpr size_t kMaxGroups = 4096;  // limit of tables and buffers

class StepBuffers {
 public:
  StepBuffers(int64_t max_sequences, int64_t max_tokens, int64_t num_groups, SlotType slot_type, int64_t tree_words = 0,
              bool has_sealed_lens = false);

  [[nodiscard]] int32_t max_sequences() const { return max_sequences_; }
  [[nodiscard]] TokenCount max_tokens() const { return max_tokens_; }
  [[nodiscard]] size_t num_groups() const { return slots_.size(); }
  [[nodiscard]] SlotType slot_type() const { return slot_type_; }
  [[nodiscard]] int32_t num_sequences() const { return num_sequences_; }
  [[nodiscard]] TokenCount num_tokens() const { return num_tokens_; }
  [[nodiscard]] size_t nbytes() const { return memory_.nbytes(); }
  // All arrays; each starts at a multiple of 64 bytes from here.
  [[nodiscard]] const std::byte* image() const { return reinterpret_cast<const std::byte*>(rows_); }
  [[nodiscard]] size_t image_nbytes() const { return image_nbytes_; }

  [[nodiscard]] RowId* rows() { return rows_; }
  [[nodiscard]] TokenCount* query_lens() { return query_lens_; }
  [[nodiscard]] TokenCount* cu_query_lens() { return cu_query_lens_; }
  [[nodiscard]] TokenCount* seq_lens() { return seq_lens_; }
  [[nodiscard]] TokenCount* positions() { return positions_; }
  [[nodiscard]] int32_t* token_ids() { return token_ids_; }
  // Words of a row of bits; 0: steps have no trees.
  [[nodiscard]] int64_t tree_words() const { return tree_words_; }
  [[nodiscard]] uint64_t* tree_mask() { return tree_mask_; }
  // nullptr unless the steps have sealed blocks.
  [[nodiscard]] TokenCount* sealed_lens() { return sealed_lens_; }
  [[nodiscard]] void* slots(size_t group) { return slots_[group]; }

  // Sets the slots of tokens [from, to) to padding, so that the step writes nothing there. Precondition: 0 <= from <=
  // to
  // <= max_tokens().
  void skip_slots(TokenCount from, TokenCount to);
  // Restores I1 after the entries of a step are written.
  void pad(int32_t num_sequences, TokenCount num_tokens, RowId null_row);

  void check_invariants() const;

 private:
  void pad_slots(void* slots, TokenCount from, TokenCount to) const;

  int32_t max_sequences_;
  TokenCount max_tokens_;
  SlotType slot_type_;
  int64_t tree_words_;
  int32_t num_sequences_ = 0;
  TokenCount num_tokens_ = 0;
  RowId null_row_ = 0;  // padding of rows_
  ZeroedArray<std::byte> memory_;
  size_t image_nbytes_;
  RowId* rows_;
  TokenCount* query_lens_;
  TokenCount* cu_query_lens_;
  TokenCount* seq_lens_;
  TokenCount* positions_;
  int32_t* token_ids_;
  uint64_t* tree_mask_;
  TokenCount* sealed_lens_;
  std::vector<void*> slots_;
};

}  // namespace pagecore
