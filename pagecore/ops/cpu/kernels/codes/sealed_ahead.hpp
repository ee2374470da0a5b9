// Prefetching the sealed tokens of the next head in the course of the products with this one.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/unpack_sealed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Tokens of a channel of keys in a word of 4-bit codes, or in half a word of 2-bit codes.
constexpr int kQuarterTokens = 8;

// The sealed tokens of a head in a tile, which are prefetched in a number of steps.
class SealedAhead {
 public:
  // Prefetches nothing if `places` is null.
  PC_FORCE_INLINE SealedAhead(const SealedPlane& plane, bool is_key, const Cache& newest, const RowOffsets* places,
                              int64_t head)
      : plane_(plane),
        is_key_(is_key),
        block_size_(newest.block_size),
        dim_(newest.dim),
        head_(head),
        places_(places),
        quarters_(places == nullptr ? 0 : places->num_sealed / kQuarterTokens) {}

  PC_FORCE_INLINE void begin(int64_t steps) { steps_ = steps; }
  PC_FORCE_INLINE void step() {
    for (credit_ += quarters_; credit_ >= steps_; credit_ -= steps_) prefetch_quarter();
  }

 private:
  // Not inlined, because the products need the registers, and with an effect, without which GCC 12 drops it.
  [[gnu::noinline]] void prefetch_quarter() {
    asm volatile("");
    if (quarter_ == quarters_) return;
    const int64_t slot = places_->codes[quarter_++ * kQuarterTokens];
    const bool enters = slot < begin_ || slot >= begin_ + block_size_;
    if (enters) enter_block(slot);
    is_key_ ? prefetch_keys(slot - begin_, enters) : prefetch_values(slot - begin_);
  }

  PC_FORCE_INLINE void enter_block(int64_t slot) {
    const int64_t block = slot / block_size_;
    const SealedHead head{plane_, block, head_};
    begin_ = block * block_size_;
    words_ = head.words;
    scales_ = head.scales;
    if (!is_key_) return;
    const int64_t bytes = dim_ * size_of(plane_.scale_type);
    for (int64_t token = 0; token < block_size_; token += plane_.group, scales_ += plane_.scales_row_stride) {
      prefetch_bytes(scales_, bytes);
      prefetch_bytes(scales_ + plane_.least_stride, bytes);
    }
  }
  PC_FORCE_INLINE void prefetch_keys(int64_t token, bool enters) const {
    const int shift = plane_.bits == 2 ? 4 : 3;
    const bool begins_row = (token & ((1 << shift) - 1)) == 0;
    if (enters || begins_row) prefetch_bytes(words_ + (token >> shift) * plane_.row_stride, 4 * dim_);
  }
  PC_FORCE_INLINE void prefetch_values(int64_t token) const {
    const char* words = words_ + token * plane_.row_stride;
    const char* scales = scales_ + token * plane_.scales_row_stride;
    const int64_t bytes = dim_ * plane_.bits / 8;
    for (int i = 0; i < kQuarterTokens; ++i, words += plane_.row_stride, scales += plane_.scales_row_stride) {
      prefetch_new_lines(words, bytes, plane_.head_stride);
      prefetch_new_lines(scales, 1, plane_.scales_head_stride);
    }
  }
  // Prefetches bytes of a head. The first line is left out if the previous head, whose data begins `stride` bytes
  // lower, begins in it.
  PC_FORCE_INLINE void prefetch_new_lines(const char* p, int64_t bytes, int64_t stride) const {
    const auto line = [](const char* at) { return reinterpret_cast<uintptr_t>(at) / kLine; };
    if (head_ != 0 && line(p) == line(p - stride)) p += kLine, bytes -= kLine;
    prefetch_bytes(p, bytes);
  }

  const SealedPlane& plane_;
  const bool is_key_;
  const int64_t block_size_, dim_, head_;
  const RowOffsets* const places_;
  const int64_t quarters_;
  int64_t steps_ = 1, credit_ = 0, quarter_ = 0;
  int64_t begin_ = INT64_MIN / 2;  // slot of the current block
  const char* words_ = nullptr;
  const char* scales_ = nullptr;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
