// Stored formats in prefill.cu: codes and scales of a tile, which the CTA unpacks once for all of its rows.
//
//   codes    [keys, values][tokens]        copied one tile ahead by cp.async
//              |
//              | all threads unpack the keys, and later the values
//              v
//   tile     [tokens, kDim] of T           keys for S = Q K^T, then the values for O += P V, in the same place
//
// Both types of products hold every code exactly. Scales of groups are multiplied in while codes are unpacked, which
// rounds nothing. Scales of rows are factors of columns: those of keys of S, and those of values of P. UE8M0 scales
// exceed halves, so that such formats need bfloat16.
//
//   score        codes of the tile have arrived: unpack keys; copy the next key codes; S = Q K^T, times scales of keys
//   softmax      weights, times scales of values
//   accumulate   unpack values; copy the next value codes; O += P V
//
// Halves would overflow if weights were multiplied by any scale, so that rows have units (row_units.cuh). The first
// score of a piece of a fold shrinks the contributions before it to 0: its bits do not depend on the pieces before.
#pragma once

#include "cuda_src/attention/prefill/sums.cuh"
#include "cuda_src/attention/softmax/row_units.cuh"
#include "cuda_src/attention/tiles/stored_unpack.cuh"

namespace pagecore {

template <typename T, int kBits, int kDim, typename ScoreOptions>
struct PrefillStoredTile : PrefillTile<T, kDim, ScoreOptions, kDim, kBits> {
  using Base = PrefillTile<T, kDim, ScoreOptions, kDim, kBits>;
  static constexpr int kNumBits = kBits;
  static constexpr int kChunks = kDim / 8;  // of an unpacked row
  static constexpr int kCodeBytes = Base::kShape.code_bytes();
  static constexpr int kScaleBytes = Base::kShape.scale_bytes();
  static constexpr bool kIsHalf = IsSame<T, pc_half>::kValue;
  using Formats = typename FormatsOf<kBits, true, !kIsHalf>::Type;
  using Units = typename UnitsOf<T>::Type;

  static_assert(kChunks == Base::KeyRow::kChunks, "a row has no padding");
};

// ---- scales of rows

// The scales of rows of keys and of values of a tile. The stored scale of a row is followed by its factor.
template <typename Tile>
class StoredScales {
  static constexpr int kWords = Tile::kScaleBytes / 4;  // of a row

 public:
  using Units = typename Tile::Units;

  PC_MEMBER StoredScales(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared)
      : p_(p), scales_((shared + Tile::kShape.scales_begin()).template as<pc_uint32>()) {}

  // Stores the factors of a tile that has arrived. A barrier of the block must follow.
  PC_MEMBER void store_factors() const {
    if (pc_thread() >= Tile::kTokens) return;
    if (pc_has_row_scale(p_.key.format)) store_factor(p_.key.format, 0, pc_thread());
    if (pc_has_row_scale(p_.value.format)) store_factor(p_.value.format, 1, pc_thread());
  }

  // Multiplies scores of a part of a tile, which begins at `key`, by the scales of its keys.
  template <int kRowTiles, int kKeyTiles>
  PC_MEMBER void scale_scores(int key, float (&s)[kRowTiles][kKeyTiles][4]) const {
    if (!pc_has_row_scale(p_.key.format)) return;
    PC_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      const float factors[2] = {column_factor(0, key, n, 0), column_factor(0, key, n, 1)};
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) s[m][n][i] *= factors[i % 2];
      }
    }
  }

  // Multiplies the weights of a part by the factors of its values. `masks`: some rows do not attend to some keys. Their
  // weights of 0 must remain 0 if the scale is NaN. `rescale`: see RowUnits.
  template <int kKeyTiles>
  PC_MEMBER void scale_weights(int key, bool masks, float (&s)[kKeyTiles][4], Units& units, float (&rescale)[2]) const {
    if (!pc_has_row_scale(p_.value.format)) return;
    PC_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      const float factors[2] = {column_factor(1, key, n, 0), column_factor(1, key, n, 1)};
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!masks || s[n][i] != 0.0f) s[n][i] *= factors[i % 2];
      }
    }
    units.apply(s, rescale);
  }

  // Multiplies O by its units.
  template <typename Sums>
  PC_MEMBER void drop_units(const Units (&units)[Tile::kRowTiles], Sums& sums) const {
    if (!Tile::kIsHalf || !pc_has_row_scale(p_.value.format)) return;
    PC_UNROLL
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      PC_UNROLL
      for (int r = 0; r < 2; ++r) sums.scale_row(m, r, units[m].unit(r));
    }
  }

 private:
  // `which`: 0 for keys, 1 for values.
  PC_MEMBER Shared<float> factor(int which, int row) const {
    return (scales_ + ((which * Tile::kTokens + row) * kWords + 1)).template as<float>();
  }
  PC_MEMBER void store_factor(PcFormat format, int which, int row) const {
    const CodeScale scale = row_scale(format, scales_.load((which * Tile::kTokens + row) * kWords));
    factor(which, row).store(0, scale.factor);
  }
  // The factor of the lane's column 2 * (lane % 4) + 8 * n + e of a part.
  PC_MEMBER float column_factor(int which, int key, int n, int e) const {
    return factor(which, key + 2 * (pc_lane() % 4) + 8 * n + e).load(0);
  }

  const PcStoredAttentionParams& p_;
  Shared<pc_uint32> scales_;
};

// ---- copies

// The copies of tiles of codes and scales, and their unpacking. See PrefillFeed.
template <typename Tile>
class StoredFeed : public PrefillSource<Tile> {
  using Base = PrefillSource<Tile>;

 public:
  PC_MEMBER StoredFeed(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared)
      : Base(shared), p_(p), slots_((shared + Tile::kShape.slots_begin()).template as<Slot>()), scales_(p, shared) {}

  PC_MEMBER void begin(const PcAttentionParams& p, const KeyRange& keys, int token) {
    this->look_up(p, keys, token);
    store_slots();
    pc_sync_block();
    copy(p_.key, p.head_dim, 0, keys, token);
    copy(p_.value, p.value_dim, 1, keys, token);
    this->look_up(p, keys, token + Tile::kTokens);
  }

  PC_MEMBER void open_keys(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    pc_wait_copies<0>();  // fault: prefill_stored_wait
    pc_sync_block();      // all codes of the tile have arrived, and all warps are done with the previous values
    store_slots();
    scales_.store_factors();
    unpack(p_.key.format, 0);
    pc_sync_block();  // fault: prefill_stored_barrier_after_keys
    if (token + Tile::kTokens < keys.end) copy(p_.key, p.head_dim, 0, keys, token + Tile::kTokens);
  }

  PC_MEMBER void open_values(const PcAttentionParams& p, const KeyRange& keys, int token) {
    pc_sync_block();  // fault: prefill_stored_barrier_before_values
    unpack(p_.value.format, 1);
    pc_sync_block();  // fault: prefill_stored_barrier_after_values
    if (token + Tile::kTokens < keys.end) copy(p_.value, p.value_dim, 1, keys, token + Tile::kTokens);
    this->look_up(p, keys, token + 2 * Tile::kTokens);
  }

 private:
  PC_MEMBER void store_slots() const {
    if (pc_thread() < Tile::kTokens) slots_.store(pc_thread(), this->slot_);
  }

  PC_MEMBER static int codes_begin(int which) {
    return Tile::kShape.codes_begin() + which * Tile::kTokens * Tile::kCodeBytes;
  }
  PC_MEMBER static int scales_begin(int which) {
    return Tile::kShape.scales_begin() + which * Tile::kTokens * Tile::kScaleBytes;
  }

  PC_MEMBER void unpack(PcFormat format, int which) const {
    const StoredPart part = {this->shared_ + codes_begin(which), this->shared_ + scales_begin(which),
                             this->shared_ + Tile::kShape.keys_begin(), format};
    unpack_part<Tile, Tile::kTokens, Tile::kThreads>(part, pc_opaque(pc_thread()), typename Tile::Formats());
  }

  // Starts to copy the codes and scales of the tile that begins at `token`, `which`: 0 for keys, 1 for values. Zeros
  // past the dims of the call, and for tokens that the item does not have.
  PC_MEMBER void copy(const PcStored& stored, int dim, int which, const KeyRange& keys, int token) const {
    constexpr int kChunks = Tile::kCodeBytes / 16;
    const int num_chunks = dim * Tile::kNumBits / 128;
    const Global<pc_uint8> codes = Global<pc_uint8>(stored.codes.data) + pc_block_y() * stored.codes.head_stride;
    PC_UNROLL
    for (int at = pc_opaque(pc_thread()); at < Tile::kTokens * kChunks; at += Tile::kThreads) {
      const int row = at / kChunks, chunk = at % kChunks;
      const bool exists = chunk < num_chunks && keys.has(token + row);  // fault: prefill_codes_past_dims
      pc_copy_async(this->shared_.address(codes_begin(which) + 16 * at), codes,
                    slot_offset(stored.codes, slots_.load(row)) + 16 * chunk, exists);
    }
    if (stored.scales.data != 0) copy_scales(stored, dim, which, keys, token);
    pc_commit_copies();
  }

  PC_MEMBER void copy_scales(const PcStored& stored, int dim, int which, const KeyRange& keys, int token) const {
    constexpr int kWords = Tile::kScaleBytes / 4;
    const PcScales& scales = stored.scales;
    const int num_bytes = pc_scale_bytes(stored.format, dim), num_words = num_bytes / 4;
    const Global<pc_uint8> own = Global<pc_uint8>(scales.data) + pc_block_y() * scales.head_stride;
    const pc_uint64 steps = scales.data | scales.block_stride | scales.token_stride | scales.head_stride | num_bytes;
    if (steps % 4 != 0) return load_scales(scales, own, num_bytes, which, keys, token);  // fault: parts_of_words
    for (int at = pc_opaque(pc_thread()); at < Tile::kTokens * kWords; at += Tile::kThreads) {
      const int row = at / kWords, word = at % kWords;
      if (word != 0 && pc_has_row_scale(stored.format)) continue;  // the factor of the row
      const Slot slot = slots_.load(row);
      pc_copy_word_async(this->shared_.address(scales_begin(which) + 4 * at), own,
                         slot.block * scales.block_stride + slot.offset * scales.token_stride + 4 * word,
                         word < num_words && keys.has(token + row));
    }
  }

  // copy_scales for rows of scales that are not whole words. The threads wait for the loads.
  PC_MEMBER void load_scales(const PcScales& scales, const Global<pc_uint8>& own, int num_bytes, int which,
                             const KeyRange& keys, int token) const {
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < Tile::kTokens * Tile::kScaleBytes; at += Tile::kThreads) {
      const int row = at / Tile::kScaleBytes, byte = at % Tile::kScaleBytes;
      const Slot slot = slots_.load(row);
      pc_uint8 scale = 0;
      if (byte < num_bytes && keys.has(token + row)) {
        scale = own.load(slot.block * scales.block_stride + slot.offset * scales.token_stride + byte);
      }
      this->shared_.store(scales_begin(which) + at, scale);
    }
  }

  const PcStoredAttentionParams& p_;
  Shared<Slot> slots_;
  StoredScales<Tile> scales_;
};

}  // namespace pagecore
