#include "pagecore/index/tables/step_buffers.hpp"

#include <algorithm>

#include "pagecore/index/sizes.hpp"
#include "pagecore/native/rounding.hpp"

namespace pagecore {
namespace {

constexpr size_t kAlignment = 64;  // required by JAX for shared memory

size_t aligned(size_t nbytes) { return round_up(nbytes, kAlignment); }

size_t slot_size(SlotType type) { return type == SlotType::Int64 ? sizeof(int64_t) : sizeof(int32_t); }

size_t tree_size(int64_t tokens, int64_t words) {
  return static_cast<size_t>(tokens) * static_cast<size_t>(words) * sizeof(uint64_t);
}

size_t total_size(int64_t sequences, int64_t tokens, int64_t groups, SlotType slot_type, int64_t tree_words,
                  bool has_sealed_lens) {
  const auto a_sequence = aligned(static_cast<size_t>(sequences + 1) * sizeof(int32_t));
  const auto a_token = aligned(static_cast<size_t>(tokens) * sizeof(int32_t));
  const auto a_slot = aligned(static_cast<size_t>(tokens) * slot_size(slot_type));
  return (has_sealed_lens ? 5 : 4) * a_sequence + 2 * a_token + static_cast<size_t>(groups) * a_slot +
         aligned(tree_size(tokens, tree_words)) + kAlignment;
}

}  // namespace

StepBuffers::StepBuffers(int64_t max_sequences, int64_t max_tokens, int64_t num_groups, SlotType slot_type,
                         int64_t tree_words, bool has_sealed_lens)
    : max_sequences_(checked_size("max_sequences", max_sequences, 0, kMaxInt32 - 1)),
      max_tokens_(checked_size("max_tokens", max_tokens, 0, kMaxInt32)),
      slot_type_(slot_type),
      tree_words_(checked_size<int64_t>("tree_words", tree_words, 0, kMaxInt32 / 64)),
      memory_(total_size(max_sequences, max_tokens, checked_size<int64_t>("num_groups", num_groups, 0, kMaxGroups),
                         slot_type, tree_words, has_sealed_lens)) {
  auto at = reinterpret_cast<std::byte*>(aligned(reinterpret_cast<uintptr_t>(memory_.data())));
  const auto carve = [&at](size_t nbytes) {
    std::byte* const start = at;
    at += aligned(nbytes);
    return start;
  };
  const size_t a_sequence = static_cast<size_t>(max_sequences_ + 1) * sizeof(int32_t);
  rows_ = reinterpret_cast<RowId*>(carve(a_sequence));
  query_lens_ = reinterpret_cast<TokenCount*>(carve(a_sequence));
  cu_query_lens_ = reinterpret_cast<TokenCount*>(carve(a_sequence));
  seq_lens_ = reinterpret_cast<TokenCount*>(carve(a_sequence));
  positions_ = reinterpret_cast<TokenCount*>(carve(static_cast<size_t>(max_tokens_) * sizeof(TokenCount)));
  token_ids_ = reinterpret_cast<int32_t*>(carve(static_cast<size_t>(max_tokens_) * sizeof(int32_t)));
  tree_mask_ = reinterpret_cast<uint64_t*>(carve(tree_size(max_tokens_, tree_words_)));
  sealed_lens_ = has_sealed_lens ? reinterpret_cast<TokenCount*>(carve(a_sequence)) : nullptr;
  for (int64_t group = 0; group < num_groups; ++group) {
    slots_.push_back(carve(static_cast<size_t>(max_tokens_) * slot_size(slot_type_)));
    pad_slots(slots_.back(), 0, max_tokens_);
  }
  image_nbytes_ = static_cast<size_t>(at - image());
}

void StepBuffers::pad(int32_t num_sequences, TokenCount num_tokens, RowId null_row) {
  const bool is_new_table = null_row != null_row_;
  const int32_t last_sequence = is_new_table ? max_sequences_ : num_sequences_;
  if (last_sequence > num_sequences) {
    std::fill(rows_ + num_sequences, rows_ + last_sequence, null_row);
    std::fill(query_lens_ + num_sequences, query_lens_ + last_sequence, 0);
    std::fill(seq_lens_ + num_sequences, seq_lens_ + last_sequence, 0);
    if (sealed_lens_ != nullptr) std::fill(sealed_lens_ + num_sequences, sealed_lens_ + last_sequence, 0);
  }
  if (num_sequences != num_sequences_ || num_tokens != num_tokens_) {
    std::fill(cu_query_lens_ + num_sequences + 1, cu_query_lens_ + max_sequences_ + 1, num_tokens);
  }
  if (num_tokens_ > num_tokens) {
    std::fill(positions_ + num_tokens, positions_ + num_tokens_, 0);
    std::fill(token_ids_ + num_tokens, token_ids_ + num_tokens_, 0);
    for (void* slots : slots_) pad_slots(slots, num_tokens, num_tokens_);
  }
  num_sequences_ = num_sequences;
  num_tokens_ = num_tokens;
  null_row_ = null_row;
}

void StepBuffers::skip_slots(TokenCount from, TokenCount to) {
  PC_ASSERT(0 <= from && from <= to && to <= max_tokens_);
  for (void* slots : slots_) pad_slots(slots, from, to);
}

void StepBuffers::pad_slots(void* slots, TokenCount from, TokenCount to) const {
  if (slot_type_ == SlotType::Int64) {
    std::fill(static_cast<int64_t*>(slots) + from, static_cast<int64_t*>(slots) + to, kPaddingSlot);
  } else {
    std::fill(static_cast<int32_t*>(slots) + from, static_cast<int32_t*>(slots) + to,
              static_cast<int32_t>(kPaddingSlot));
  }
}

void StepBuffers::check_invariants() const {
  for (int32_t i = num_sequences_; i < max_sequences_; ++i) {
    PC_ASSERT(rows_[i] == null_row_ && query_lens_[i] == 0 && seq_lens_[i] == 0);
    PC_ASSERT(cu_query_lens_[i + 1] == num_tokens_ && (sealed_lens_ == nullptr || sealed_lens_[i] == 0));
  }
  for (TokenCount i = num_tokens_; i < max_tokens_; ++i) {
    PC_ASSERT(positions_[i] == 0 && token_ids_[i] == 0);
    for (const void* slots : slots_) {
      PC_ASSERT((slot_type_ == SlotType::Int64 ? static_cast<const int64_t*>(slots)[i]
                                               : static_cast<const int32_t*>(slots)[i]) == kPaddingSlot);
    }
  }
}

}  // namespace pagecore
