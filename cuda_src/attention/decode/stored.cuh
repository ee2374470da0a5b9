// Stored formats in decode.cu: rings of codes and scales, which a warp unpacks to the 16-bit tiles that it multiplies.
//
//   ring     [stages][key codes, value codes, key scales, value scales]    3 stages of 8 bits a number, or 6 of 4
//              |
//              | a warp unpacks 16 keys and 16 values, 8 numbers of a lane at a time (stored_unpack.cuh)
//              v
//   tile     [32, kDim] of T, rows as in ring.cuh           ldmatrix
//
// Scales of groups are multiplied in while codes are unpacked, which rounds nothing. Scales of rows are exact only in
// float32: those of keys are factors of the columns of S, and those of values of the columns of P (stored_rows.cuh).
#pragma once

#include "cuda_src/attention/decode/rows.cuh"
#include "cuda_src/attention/softmax/row_units.cuh"
#include "cuda_src/attention/tiles/stored_unpack.cuh"
#include "cuda_src/shapes/stored.h"

namespace pagecore {

// A row of codes in a stage, without padding.
template <int kRowBytes>
struct StagedRow {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kLanes = kChunks;  // of a warp that copy a row

  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + chunk * 16; }
  PC_MEMBER static SharedAddress below(SharedAddress address, int rows) { return address + rows * kRowBytes; }
};

template <typename T, int kBits, int kDim>
struct StoredTile {
  using Element = T;
  using KeyRow = TileRow<kDim>;
  using ValueRow = TileRow<kDim>;
  static constexpr PcStoredShape kShape = {kBits, kDim};
  static constexpr PcRingShape kRing = kShape.ring();
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kKeySteps = kDim / 16;  // of matrix instructions
  static constexpr int kValues = kDim;
  static constexpr int kValueTiles = kDim / 8;  // of O
  static constexpr int kNumBits = kBits;
  static constexpr int kChunks = kDim / 8;  // of an unpacked row
  static constexpr int kCodeBytes = kShape.code_bytes();
  static constexpr int kScaleBytes = kShape.scale_bytes();
  // Rows of a stage, and the number of slots that a lane holds.
  using StoredKeyRow = StagedRow<kCodeBytes>;
  using StoredValueRow = StagedRow<kCodeBytes>;
  static constexpr int kValuesBegin = kTokens * kCodeBytes;
  static constexpr int kScalesBegin = 2 * kValuesBegin;
  static constexpr int kAhead = kDim == 256 ? 2 : kTokens;
  static constexpr int kTileBytes = kShape.tile_bytes();
  static constexpr int kFactorsBegin = kRing.weights_begin() + kWarps * kTokens * 16;
  static constexpr bool kIsHalf = IsSame<T, pc_half>::kValue;  // else no format has row scales, nor a row a factor
  using Formats = typename FormatsOf<kBits, kIsHalf, !kIsHalf>::Type;
  using Units = typename UnitsOf<T>::Type;
  PC_MEMBER static bool has_chunk(int chunk, int dim) { return chunk * 16 < dim * kBits / 8; }
  // O of a warp at the end of an item, in its unpacked tiles.
  static constexpr int kSumsStride = 2 * kTileBytes;
  PC_MEMBER static int sums_begin(int) { return kRing.queries_begin() + kTileBytes; }

  static_assert(kChunks == KeyRow::kChunks, "a row has no padding");
  static_assert(kRing.stage_bytes % 128 == 0, "unpacked rows begin at a multiple of 128");
  static_assert(kSumsStride >= kRing.warp_rows * kDim * 4, "the sums of an item fit in the unpacked tiles");
};

// The values of the stage of some keys.
template <typename Tile>
PC_DEVICE StoredPart values_of(const StoredPart& keys) {
  return {keys.codes + Tile::kValuesBegin, keys.scales + Tile::kTokens * Tile::kScaleBytes,
          keys.tile + Tile::kTileBytes, keys.format};
}

// A warp's ring of tiles, and the walk that fills it.
template <typename Tile>
class DecodeStoredRing : public WarpRing<DecodeStoredRing<Tile>, Tile> {
  using Base = WarpRing<DecodeStoredRing<Tile>, Tile>;

 public:
  static constexpr bool kAllLanesLocate = false;

  PC_MEMBER DecodeStoredRing(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                             const WorkRange& work)
      : Base(shared), p_(p) {
    this->start_walk(p.attention, work, 0, heads.count);
  }

  PC_MEMBER void locate(const PcAttentionParams& p, const WalkState& /*state*/, int /*stage*/) const {
    const Slot slot = this->slot(p);
    this->store_address(this->slots(), 0, codes_at(p_.key, slot));
    this->store_address(this->slots(), 1, codes_at(p_.value, slot));
    if (!has_scales()) return;
    this->store_address(scale_slots(), 0, scales_at(p_.key, slot));
    this->store_address(scale_slots(), 1, scales_at(p_.value, slot));
  }

  PC_MEMBER void copy(const PcAttentionParams& p, const WalkState& state, int stage) const {
    copy_rows<Tile>(p, state, this->slots(), Base::keys(stage, pc_warp()), Base::values(stage, pc_warp()));
    if (has_scales()) copy_scales(p, state, keys(stage).scales);
  }

  PC_MEMBER StoredPart keys(int stage) const {
    const Shared<pc_uint8> codes = Base::keys(stage, pc_warp());
    const Shared<pc_uint8> tile = this->shared_ + (Tile::sums_begin(0) + pc_warp() * Tile::kSumsStride);
    return {codes, codes + Tile::kScalesBegin, tile, p_.key.format};
  }
  PC_MEMBER StoredPart values(int stage) const { return values_of<Tile>(keys(stage)); }

 private:
  PC_MEMBER static pc_address codes_at(const PcStored& stored, const Slot& slot) {
    const Global<pc_uint8> codes(stored.codes.data);
    return (codes + (slot_offset(stored.codes, slot) + pc_block_y() * stored.codes.head_stride)).address();
  }
  PC_MEMBER static pc_address scales_at(const PcStored& stored, const Slot& slot) {
    const PcScales& scales = stored.scales;
    return (Global<pc_uint8>(scales.data) +
            (slot.block * scales.block_stride + slot.offset * scales.token_stride + pc_block_y() * scales.head_stride))
        .address();
  }

  // A lane copies words of scales; zeros past those of the call and for tokens that the item does not have.
  PC_MEMBER void copy_scales(const PcAttentionParams& p, const WalkState& state, const Shared<pc_uint8>& scales) const {
    constexpr int kWords = Tile::kScaleBytes / 4;
    const int key_bytes = pc_scale_bytes(p_.key.format, p.head_dim);
    const int value_bytes = pc_scale_bytes(p_.value.format, p.value_dim);
    for (int at = pc_lane(); at < Tile::kTokens * kWords; at += 32) {
      const int row = at / kWords, byte = at % kWords * 4;
      const bool exists = state.keys.has(state.token + row);
      const SharedAddress target = scales.address(4 * at);
      const Global<pc_uint8> key(scale_slots().load(2 * row)), value(scale_slots().load(2 * row + 1));
      pc_copy_word_async(target, key, byte, exists && byte < key_bytes);
      pc_copy_word_async(target + Tile::kTokens * Tile::kScaleBytes, value, byte, exists && byte < value_bytes);
    }
  }

  PC_MEMBER bool has_scales() const { return !Tile::kIsHalf || p_.key.scales.data != 0; }

  // Addresses of the scales of the tokens of a tile: of keys and of values, alternating.
  PC_MEMBER Shared<pc_address> scale_slots() const {
    return (this->shared_ + (Tile::kRing.weights_begin() + pc_warp() * Tile::kTokens * 16)).template as<pc_address>();
  }

  const PcStoredAttentionParams& p_;
};

}  // namespace pagecore
