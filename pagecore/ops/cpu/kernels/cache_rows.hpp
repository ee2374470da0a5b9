// The rows of the keys or values of a cache, for the heads of one pass.
//
// Plain rows are read where they are. Rows of a quantised cache are unpacked to bfloat16, a tile of a head at a time,
// into memory that stays in L1.
#pragma once

#include "pagecore/ops/cpu/kernels/unpack.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

class CacheRows {
 public:
  CacheRows(const Cache& cache, int64_t head_begin)
      : cache_(cache), head_begin_(head_begin), row_bytes_(row_bytes(cache)), stride_(unpacked_stride(cache.dim)) {
    if (is_plain(cache)) return;
    for (int t = 0; t < kTileTokens; ++t) {
      offsets_[t] = t * stride_ * static_cast<int64_t>(sizeof(uint16_t));
      factors_[t] = 0.0f;
    }
  }

  // The type of the numbers that read() returns.
  [[nodiscard]] Float type() const { return is_plain(cache_) ? cache_.type : Float::BF16; }
  // True if the numbers that read() returns are in split order.
  [[nodiscard]] bool is_split() const { return row_bytes_ < cache_.dim && splits(cache_.dim); }
  [[nodiscard]] int64_t stored_bytes() const { return row_bytes_; }

  // The rows of `head` at the places of a tile. They are valid until the next call with the same memory.
  TokenRows read(const RowOffsets& places, int64_t head, const TileUse& use, NextRows& next_rows, uint16_t* memory) const {
    const TokenRows stored = codes_of(places, head);
    if (is_plain(cache_)) return stored;
    unpack_rows(cache_, stored, scales_of(places, head), use, next_rows, memory, stride_);
    next_rows = {};
    return {reinterpret_cast<const char*>(memory), offsets_};
  }

  // The rows of `head` for the kernels to prefetch.
  [[nodiscard]] NextRows next(const RowOffsets& places, int64_t head) const {
    return {0, codes_of(places, head), row_bytes_, scales_of(places, head)};
  }

  // The rows of the head after `head`, whose rows are in use.
  [[nodiscard]] NextRows next_head(const RowOffsets& places, int64_t head) const {
    if (is_plain(cache_)) return {cache_.head_stride, {}, 0, {}};
    return next(places, head + 1);
  }

  // The factor of each token of `head`, 0 for tokens that are not in use; null if tokens have no factors.
  const float* factors(const RowOffsets& places, int64_t head, const TileUse& use) {
    if (!has_token_factors()) return nullptr;
    const TokenRows scales = scales_of(places, head);
    const bool whole = use.used == nullptr && use.first == 0 && use.last == kTileTokens;
    for (int t = 0; t < kTileTokens; ++t) {
      const bool used = whole || (t >= use.first && t < use.last && (use.used == nullptr || use.used[t] != 0));
      factors_[t] = used ? *reinterpret_cast<const float*>(scales.base + scales.offsets[t]) : 0.0f;
    }
    if (cache_.format != Format::I4Token) return factors_;
    for (int t = 0; t < kTileTokens; t += kLanes) {  // the low bits hold the zero point
      store(factors_ + t, (Vec)((BitVec)load(factors_ + t) & ~uint32_t{15}));
    }
    return factors_;
  }

 private:
  [[nodiscard]] bool has_token_factors() const {
    return cache_.format == Format::E4M3Token || cache_.format == Format::I8Token || cache_.format == Format::I4Token;
  }
  [[nodiscard]] TokenRows codes_of(const RowOffsets& places, int64_t head) const {
    return {cache_.data + (head_begin_ + head) * cache_.head_stride, places.codes};
  }
  [[nodiscard]] TokenRows scales_of(const RowOffsets& places, int64_t head) const {
    if (cache_.scales.data == nullptr) return {};
    return {cache_.scales.data + (head_begin_ + head) * cache_.scales.head_stride, places.scales};
  }

  const Cache& cache_;
  const int64_t head_begin_, row_bytes_, stride_;
  int64_t offsets_[kTileTokens];  // of unpacked rows
  alignas(64) float factors_[kTileTokens];
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
