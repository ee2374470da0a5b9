// The rows of the keys or values of a cache, for the heads of one pass.
//
// Plain rows are read where they are. Rows of a quantised cache are unpacked to bfloat16, a tile of a head at a time,
// into memory that stays in L1; or, where pairs of bfloat16 are multiplied, packed as a panel of pairs. Few query rows
// are multiplied with the codes. Tiles with sealed tokens that are not multiplied so are unpacked to float32.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/accumulate_codes_amx.hpp"
#include "pagecore/ops/cpu/kernels/codes/code_products.hpp"
#include "pagecore/ops/cpu/kernels/codes/digit_values.hpp"
#include "pagecore/ops/cpu/kernels/codes/pack_key_codes.hpp"
#include "pagecore/ops/cpu/kernels/codes/pack_value_codes.hpp"
#include "pagecore/ops/cpu/kernels/codes/score_codes_amx.hpp"
#include "pagecore/ops/cpu/kernels/codes/sealed_products.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Bytes of the rows of a head in a block from which on they are read page by page. Shorter runs take less time in four
// streams.
constexpr int64_t kLeastRun = 1024;

PC_FORCE_INLINE Float number_type(const Cache& cache) { return is_plain(cache) ? cache.type : Float::BF16; }

class CacheRows {
 public:
  CacheRows(const Cache& cache, const SealedPlane& sealed, bool is_key, const AttentionBatch& batch, int64_t head_begin,
            bool pairs, CodeProducts products, bool takes_integers)
      : cache_(cache),
        sealed_(sealed),
        is_key_(is_key),
        tables_(*batch.code_tables),
        head_begin_(head_begin),
        reads_by_pages_(kMayReadByPages && batch.reads_by_pages && batch.multiplies_pairs),
        packs_(pairs && packs_codes(cache)),
        products_(products),
        multiplies_sealed_(takes_integers && has_sealed_products(sealed, cache, is_key)),
        row_bytes_(row_bytes(cache)),
        stride_(unpacked_stride(cache.dim)) {
    if (is_plain(cache) && !has_sealed()) return;
    const int64_t size = has_sealed() ? 4 : 2;
    for (int t = 0; t < kTileTokens; ++t) {
      offsets_[t] = t * stride_ * size;
      factors_[t] = 0.0f;
    }
  }

  // The type of the numbers that read() returns.
  [[nodiscard]] Float type(const RowOffsets& places) const {
    return has_sealed(places) ? Float::F32 : number_type(cache_);
  }
  [[nodiscard]] int64_t stored_bytes() const { return row_bytes_; }
  // True if the rows of a head are read page by page (prefetch.hpp).
  [[nodiscard]] bool by_pages() const {
    const bool contiguous = cache_.token_stride == row_bytes_ && cache_.block_size * row_bytes_ >= kLeastRun;
    return reads_by_pages_ && !has_sealed() && number_type(cache_) != Float::F32 && contiguous;
  }

  // The rows of `head` at the places of a tile. Unpacked rows are valid until the next call with the same memory;
  // unpacking prefetches `next_rows` and clears it.
  TokenRows read(const RowOffsets& places, int64_t head, const TileUse& use, NextRows& next_rows,
                 uint16_t* memory) const {
    if (has_sealed(places)) {
      auto* const rows = reinterpret_cast<float*>(memory);
      unpack_sealed(sealed_, is_key_, cache_, places, head_begin_ + head, use, rows, stride_);
      return {reinterpret_cast<const char*>(rows), offsets_};
    }
    const TokenRows stored = codes_of(places, head);
    if (is_plain(cache_)) return stored;
    unpack_rows(cache_, tables_, stored, scales_of(places, head), use, next_rows, memory, stride_);
    next_rows = {};
    return {reinterpret_cast<const char*>(memory), offsets_};
  }

  // True if pack_keys() and pack_values() make panels of pairs of bfloat16.
  [[nodiscard]] bool packs() const { return packs_; }
  void pack_keys(const RowOffsets& places, int64_t head, const TileUse& use, const NextRows& next_rows,
                 const Scratch& scratch) const {
    pack_key_codes(cache_, stored(places, head, use, scratch), next_rows, reinterpret_cast<uint32_t*>(scratch.key));
  }
  void pack_values(const RowOffsets& places, int64_t head, const TileUse& use, const NextRows& next_rows,
                   const Scratch& scratch) const {
    pack_value_codes(cache_, stored(places, head, use, scratch), next_rows, reinterpret_cast<uint32_t*>(scratch.value));
  }

  // Scores and sums of few query rows with AMX.
  void score(AmxTiles& tiles, const HeadRows& rows, const uint32_t* query_panel, const RowOffsets& places, int64_t head,
             const TileUse& use, const NextRows& next_rows, const Scratch& scratch) const {
    score_codes_amx(tiles, rows, query_panel, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }
  void accumulate(AmxTiles& tiles, const HeadRows& rows, const RowOffsets& places, int64_t head, const TileUse& use,
                  const NextRows& next_rows, const Scratch& scratch) const {
    accumulate_codes_amx(tiles, rows, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }

  // The same with AMX and digits. accumulate_digits() returns false, having changed nothing, if weights have none.
  [[nodiscard]] bool takes_digits(int64_t rows) const { return has_digits(cache_, rows); }
  void score_digits(AmxTiles& tiles, const HeadRows& rows, const uint32_t* query_panel, const RowOffsets& places,
                    int64_t head, const TileUse& use, const NextRows& next_rows, const Scratch& scratch) const {
    PC_ISA::score_digits(tiles, rows, query_panel, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }
  [[nodiscard]] bool accumulate_digits(AmxTiles& tiles, const HeadRows& rows, const RowOffsets& places, int64_t head,
                                       const TileUse& use, const NextRows& next_rows, const Scratch& scratch) const {
    return PC_ISA::accumulate_digits(tiles, rows, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }

  // The same without AMX.
  [[nodiscard]] CodeProducts products() const { return products_; }
  void score_few(const HeadRows& rows, const RowOffsets& places, int64_t head, const TileUse& use,
                 const NextRows& next_rows, const Scratch& scratch) const {
    score_products(products_, rows, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }
  // Returns false, having changed nothing, if the tile has to be read.
  [[nodiscard]] bool accumulate_few(const HeadRows& rows, const RowOffsets& places, int64_t head, const TileUse& use,
                                    const NextRows& next_rows, const Scratch& scratch) const {
    return accumulate_products(products_, rows, cache_, stored(places, head, use, scratch), next_rows, scratch);
  }

  // Scores and sums of few query rows with the codes of sealed blocks, for tiles of sealed blocks alone. Both return
  // false, having changed nothing but scores, if the tile has to be read.
  [[nodiscard]] bool multiplies_sealed() const { return multiplies_sealed_; }
  [[nodiscard]] bool score_sealed(const HeadRows& rows, const RowOffsets& places, int64_t head,
                                  const SealedAhead& ahead, const Scratch& scratch) const {
    return PC_ISA::score_sealed(rows, sealed_, cache_, places, head_begin_ + head, ahead, scratch);
  }
  [[nodiscard]] bool accumulate_sealed(const HeadRows& rows, const RowOffsets& places, int64_t head,
                                       const SealedAhead& ahead, const Scratch& scratch) const {
    return PC_ISA::accumulate_sealed(rows, sealed_, cache_, places, head_begin_ + head, ahead, scratch);
  }
  // The sealed tokens of `head` for these to prefetch; `places` may be null.
  [[nodiscard]] SealedAhead sealed_ahead(const RowOffsets* places, int64_t head) const {
    return {sealed_, is_key_, cache_, has_sealed() ? places : nullptr, head_begin_ + head};
  }

  // The rows of `head` for the kernels to prefetch.
  [[nodiscard]] NextRows next(const RowOffsets& places, int64_t head) const {
    if (has_sealed()) return {};
    return {0, codes_of(places, head), row_bytes_, scales_of(places, head)};
  }

  // The rows of the head after `head`, whose rows are in use.
  [[nodiscard]] NextRows next_head(const RowOffsets& places, int64_t head) const {
    if (is_plain(cache_) && !has_sealed()) return {cache_.head_stride, {}, 0, {}, by_pages()};
    return next(places, head + 1);
  }

  // The factor of each token of `head`, 0 for tokens that are not in use; null if tokens have no factors.
  const float* factors(const RowOffsets& places, int64_t head, const TileUse& use) {
    if (!has_token_factors()) return nullptr;
    const TokenRows scales = scales_of(places, head);
    const auto factor = [&](int t) { return *reinterpret_cast<const float*>(scales.base + scales.offsets[t]); };
    if (use.used == nullptr && use.first == 0 && use.last == kTileTokens) {
      load_factors(scales);
    } else {
      for (int t = 0; t < kTileTokens; ++t) {
        const bool used = t >= use.first && t < use.last && (use.used == nullptr || use.used[t] != 0);
        factors_[t] = used ? factor(t) : 0.0f;
      }
    }
    if (cache_.format != Format::I4Token) return factors_;
    for (int t = 0; t < kTileTokens; t += kLanes) {  // the low bits hold the zero point
      store(factors_ + t, (Vec)((BitVec)load(factors_ + t) & ~uint32_t{15}));
    }
    return factors_;
  }

 private:
  [[nodiscard]] bool has_sealed() const { return sealed_.bits != 0; }
  [[nodiscard]] bool has_sealed(const RowOffsets& places) const { return has_sealed() && places.num_sealed > 0; }
  [[nodiscard]] bool has_token_factors() const {
    return cache_.format == Format::E4M3Token || cache_.format == Format::I8Token || cache_.format == Format::I4Token;
  }
  // Loads the factors of all tokens.
  PC_FORCE_INLINE void load_factors(const TokenRows& scales) {
#if defined(__AVX512BW__)
    Vec loaded[kTileDwords];
    load_dword_rows(scales.offsets, reinterpret_cast<int64_t>(scales.base), loaded);
    for (int i = 0; i < kTileDwords; ++i) store(factors_ + i * kLanes, loaded[i]);
#else
    for (int t = 0; t < kTileTokens; ++t) {
      factors_[t] = *reinterpret_cast<const float*>(scales.base + scales.offsets[t]);
    }
#endif
  }
  [[nodiscard]] PC_FORCE_INLINE StoredTile stored(const RowOffsets& places, int64_t head, const TileUse& use,
                                                  const Scratch& scratch) const {
    const float* numbers = cache_.format == Format::NVFP4 ? tables_.e4m3_numbers : tables_.ue8m0_numbers;
    return {tables_,
            numbers,
            codes_of(places, head),
            scales_of(places, head),
            use,
            reinterpret_cast<const char*>(scratch.zeros)};
  }
  [[nodiscard]] TokenRows codes_of(const RowOffsets& places, int64_t head) const {
    return {cache_.data + (head_begin_ + head) * cache_.head_stride, places.codes};
  }
  [[nodiscard]] TokenRows scales_of(const RowOffsets& places, int64_t head) const {
    if (cache_.scales.data == nullptr) return {};
    return {cache_.scales.data + (head_begin_ + head) * cache_.scales.head_stride, places.scales};
  }

  const Cache& cache_;
  const SealedPlane& sealed_;
  const bool is_key_;
  const CodeTables& tables_;
  const int64_t head_begin_;
  const bool reads_by_pages_;
  const bool packs_;
  const CodeProducts products_;
  const bool multiplies_sealed_;
  const int64_t row_bytes_, stride_;
  int64_t offsets_[kTileTokens];  // of unpacked rows
  alignas(64) float factors_[kTileTokens];
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
