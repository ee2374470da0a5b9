// The ring of decode.cu over sealed blocks: a stage has the rows of 16 tokens of the caches, or the words and scales of
// 16 tokens of a sealed block.
//
// A tile of 16 tokens lies in one block, and is sealed or not as a whole: the tokens of a block are a multiple of 16.
//
//   stage of a sealed tile   key words     [1 or 2, kDim]              16 tokens of a channel: 1 word of 2 bits, 2 of 4
//                            key scales    [2, kDim]                   scale and least number: a tile is in one group
//                            value words   [16, kDim * kBits / 32]     padded to kValuePitch bytes
//                            value scales  [16, groups, 2]             padded to kScalePitch bytes
#pragma once

#include "cuda_src/attention/decode/rows.cuh"
#include "cuda_src/attention/inputs/sealed.cuh"

namespace pagecore {

template <typename T, int kBits, int kDim>
struct SealedTile : DecodeTile<T, kDim, kDim> {
  static constexpr int kNumBits = kBits;
  static constexpr int kInWord = 32 / kBits;  // codes
  static constexpr int kCodeMask = (1 << kBits) - 1;
  static constexpr int kKeyRows = 16 / kInWord;
  static constexpr int kKeyScales = kKeyRows * kDim * 4;         // byte of a stage, here and below
  static constexpr int kValueWords = kKeyScales + 2 * kDim * 4;  // scales have up to 4 bytes
  static constexpr int kValueBytes = kDim * kBits / 8;           // of a row
  static constexpr int kValuePitch = kValueBytes + 16;           // rows of even tokens in different banks
  static constexpr int kValueScales = kValueWords + 16 * kValuePitch;
  static constexpr int kScalePitch = kDim / 16 * 2 * 4 + 4;  // groups have 16 channels or more

  static_assert(kValueScales + 16 * kScalePitch <= DecodeTile<T, kDim, kDim>::kRing.stage_bytes, "a tile fits");
  static_assert(kValueBytes % 16 == 0, "rows are whole units of cp.async");
};

// The place of the first token of a tile.
struct TilePlace {
  int block;
  int offset;  // token of the block
  bool is_sealed;
};

template <typename Tile>
class DecodeSealedRing : public WarpRing<DecodeSealedRing<Tile>, Tile> {
  using Base = WarpRing<DecodeSealedRing<Tile>, Tile>;

 public:
  static constexpr bool kAllLanesLocate = true;

  PC_MEMBER DecodeSealedRing(const PcSealedAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                             const WorkRange& work)
      : Base(shared) {
    this->start_walk(p.attention, work, 0, heads.count);
  }

  // Addresses of rows of the caches; of a sealed tile, those of value scales and of value words.
  PC_MEMBER void locate(const PcAttentionParams& p, const WalkState& /*state*/, int /*stage*/) const {
    const SealedSlot slot = this->slot(p);
    if (pc_lane() >= Tile::kTokens) return;
    const pc_int64 head = pc_block_y();
    if (!slot.is_sealed) {
      const Slot plain = {slot.block, slot.offset};
      using T = typename Tile::Element;
      const Global<T> key = Global<T>(p.key.data) + (head * p.key.head_stride + slot_offset(p.key, plain));
      const Global<T> value = Global<T>(p.value.data) + (head * p.value.head_stride + slot_offset(p.value, plain));
      this->store_address(this->slots(), 0, key.address());
      this->store_address(this->slots(), 1, value.address());
      return;
    }
    const PcSealedPlane& value = sealed_params(p).value;
    const Global<pc_uint8> scales(value.scales), words(value.words);
    const pc_int64 to_scales = slot.block * value.scales_block_stride + slot.offset * value.scales_row_stride;
    const pc_int64 to_words = slot.block * value.block_stride + slot.offset * value.row_stride;
    this->store_address(this->slots(), 0, (scales + (to_scales + head * value.scales_head_stride)).address());
    this->store_address(this->slots(), 1, (words + (to_words + head * value.head_stride)).address());
  }

  PC_MEMBER void copy(const PcAttentionParams& p, const WalkState& state, int stage) const {
    const TilePlace place = tile_place(p, state);
    if (!place.is_sealed) {
      copy_rows<Tile>(p, state, this->slots(), keys(stage), values(stage));
      return;
    }
    copy_keys(sealed_params(p).key, place, keys(stage));
    copy_values(sealed_params(p).value, p.value_dim, state, keys(stage));
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return Base::keys(stage, pc_warp()); }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return Base::values(stage, pc_warp()); }

 private:
  // The place of the tile, from the slot of the first token that the item has.
  PC_MEMBER TilePlace tile_place(const PcAttentionParams& p, const WalkState& state) const {
    const SealedSlot slot = this->slot(p);
    const int first = max_of(state.keys.begin - state.token, 0);
    return {pc_shuffle(slot.block, first), pc_shuffle(slot.offset, first) - first,
            pc_shuffle(slot.is_sealed ? 1 : 0, first) != 0};
  }

  PC_MEMBER static void copy_keys(const PcSealedPlane& key, const TilePlace& place, const Shared<pc_uint8>& stage) {
    constexpr int kUnits = Tile::kValues / 4;  // of 16 bytes, of a row of words
    const pc_int64 head = pc_block_y();
    const Global<pc_uint8> words =
        Global<pc_uint8>(key.words) + (place.block * key.block_stride + head * key.head_stride +
                                       static_cast<pc_int64>(place.offset / Tile::kInWord) * key.row_stride);
    const Global<pc_uint8> scales =
        Global<pc_uint8>(key.scales) + (place.block * key.scales_block_stride + head * key.scales_head_stride +
                                        static_cast<pc_int64>(place.offset / key.group) * key.scales_row_stride);
    for (int at = pc_lane(); at < Tile::kKeyRows * kUnits; at += 32) {
      pc_copy_async(stage.address(16 * at), words, at / kUnits * key.row_stride + at % kUnits * 16, true);
    }
    const int units = key.scale_type == PC_FLOAT32 ? Tile::kValues / 4 : Tile::kValues / 8;
    for (int at = pc_lane(); at < 2 * units; at += 32) {
      const int row = at / units, byte = at % units * 16;
      const SharedAddress to = stage.address(Tile::kKeyScales + row * Tile::kValues * 4 + byte);
      pc_copy_async(to, scales, row * key.least_stride + byte, true);
    }
  }

  // Tokens that the item does not have become zeros.
  PC_MEMBER void copy_values(const PcSealedPlane& value, int dim, const WalkState& state,
                             const Shared<pc_uint8>& stage) const {
    constexpr int kUnits = Tile::kValueBytes / 16;
    PC_UNROLL
    for (int i = 0; i < ceil_of(Tile::kTokens * kUnits, 32); ++i) {
      const int at = 32 * i + pc_lane(), row = at / kUnits % Tile::kTokens, byte = at % kUnits * 16;
      if (at >= Tile::kTokens * kUnits) break;
      const Global<pc_uint8> words(this->slots().load(2 * row + 1));
      const bool exists = state.keys.has(state.token + row);
      pc_copy_async(stage.address(Tile::kValueWords + row * Tile::kValuePitch + byte), words, byte, exists);
    }
    const int words_of_row = dim / value.group * (value.scale_type == PC_FLOAT32 ? 2 : 1);
    for (int at = pc_lane(); at < Tile::kTokens * words_of_row; at += 32) {
      const int row = at / words_of_row, byte = at % words_of_row * 4;
      const Global<pc_uint8> scales(this->slots().load(2 * row));
      const SharedAddress to = stage.address(Tile::kValueScales + row * Tile::kScalePitch + byte);
      const bool exists = state.keys.has(state.token + row);  // fault: sealed_scales_of_other_items
      pc_copy_word_async(to, scales, byte, exists);
    }
  }

  static constexpr int ceil_of(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace pagecore
