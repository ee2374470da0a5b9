#include "pagecore/index/states/state_buffers.hpp"

#include <algorithm>

#include "pagecore/index/sizes.hpp"
#include "pagecore/native/rounding.hpp"

namespace pagecore {
namespace {

constexpr size_t kAlignment = 16;  // int32 values in 64 bytes, which JAX requires for shared memory
constexpr int64_t kMaxDrafts = 1023;

size_t aligned(size_t size) { return round_up(size, kAlignment); }

// Values of the image for S sequences: five arrays [S], one [S, 2] and two [S, width].
size_t total_size(size_t sequences, size_t width) {
  return 5 * aligned(sequences) + aligned(2 * sequences) + 2 * aligned(sequences * width);
}

}  // namespace

StateBuffers::StateBuffers(int64_t max_sequences, int64_t draft_tokens)
    : max_sequences_(checked_size("max_sequences", max_sequences, 0, kMaxInt32 - 1)),
      draft_tokens_(checked_size("draft_tokens", draft_tokens, 0, kMaxDrafts)),
      memory_(total_size(static_cast<size_t>(max_sequences_), width()) +
              2 * aligned(2 * static_cast<size_t>(max_sequences_)) + kAlignment),
      image_size_(total_size(static_cast<size_t>(max_sequences_), width())) {
  const auto sequences = static_cast<size_t>(max_sequences_);
  const auto start = reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(int32_t);
  int32_t* at = memory_.data() + (aligned(start) - start);
  const auto carve = [&at](size_t size) {
    int32_t* const begin = at;
    at += aligned(size);
    return begin;
  };
  state_read_ = carve(sequences);
  state_write_ = carve(sequences);
  checkpoint_write_ = carve(sequences);
  checkpoint_lengths_ = carve(sequences);
  zeros_ = carve(sequences);
  copies_ = carve(2 * sequences);
  draft_read_ = carve(sequences * width());
  draft_write_ = carve(sequences * width());
  loads_ = carve(2 * sequences);
  saves_ = carve(2 * sequences);
}

void StateBuffers::begin(int32_t num_sequences) {
  const auto old = static_cast<size_t>(num_sequences_);
  for (int32_t* array : {state_read_, state_write_, checkpoint_write_, checkpoint_lengths_}) std::fill_n(array, old, 0);
  for (int32_t* array : {draft_read_, draft_write_}) std::fill_n(array, old * width(), 0);
  std::fill_n(zeros_, num_zeros_, 0);
  std::fill_n(copies_, 2 * static_cast<size_t>(num_copies_), 0);
  std::fill_n(loads_, 2 * static_cast<size_t>(num_loads_), 0);
  std::fill_n(saves_, 2 * static_cast<size_t>(num_saves_), 0);
  num_zeros_ = num_copies_ = num_loads_ = num_saves_ = 0;
  num_sequences_ = num_sequences;
}

void StateBuffers::skip(int32_t first, int32_t last) {
  PC_ASSERT(first >= 0 && first <= last && last <= num_sequences_);
  const auto from = static_cast<size_t>(first), count = static_cast<size_t>(last - first);
  for (int32_t* array : {state_read_, state_write_, checkpoint_write_, checkpoint_lengths_}) {
    std::fill_n(array + from, count, 0);
  }
  for (int32_t* array : {draft_read_, draft_write_}) std::fill_n(array + from * width(), count * width(), 0);
}

void StateBuffers::set_saves(const std::vector<BlockCopy>& saves) {
  PC_ASSERT(saves.size() <= static_cast<size_t>(max_sequences_));
  std::fill_n(saves_, 2 * static_cast<size_t>(num_saves_), 0);
  std::copy(saves.begin(), saves.end(), this->saves());
  num_saves_ = static_cast<int32_t>(saves.size());
}

void StateBuffers::check_invariants() const {
  const auto is_zero = [&](const int32_t* array, size_t from, size_t to) {
    return std::all_of(array + from, array + to, [](int32_t value) { return value == 0; });
  };
  const auto used = static_cast<size_t>(num_sequences_), all = static_cast<size_t>(max_sequences_);
  for (const int32_t* array : {state_read_, state_write_, checkpoint_write_, checkpoint_lengths_})
    PC_ASSERT(is_zero(array, used, all));
  for (const int32_t* array : {draft_read_, draft_write_}) PC_ASSERT(is_zero(array, used * width(), all * width()));
  PC_ASSERT(is_zero(zeros_, static_cast<size_t>(num_zeros_), all));
  PC_ASSERT(is_zero(copies_, 2 * static_cast<size_t>(num_copies_), 2 * all));
  PC_ASSERT(is_zero(loads_, 2 * static_cast<size_t>(num_loads_), 2 * all));
  PC_ASSERT(is_zero(saves_, 2 * static_cast<size_t>(num_saves_), 2 * all));
}

}  // namespace pagecore
