// The ring of decode.cu over sealed blocks: a stage has the rows of 16 tokens of the caches, or the words and scales of
// 16 tokens of a sealed block.
//
// A tile of 16 tokens lies in one block, and is sealed or not as a whole: the tokens of a block are a multiple of 16.
//
//   stage of a sealed tile   keys          words and scales (SealedKeys)
//                            value words   [16, kValueDim / 8]         with 2 bits, the first half of each row is
//                                                                      used; padded to kValuePitch
//                            value scales  [16, kValueDim / 16, 2]     4 bytes each; padded to kScalePitch
//
// If keys are selected, a tile has 16 consecutive numbers: the units of a selection are also multiples of 16 tokens.
// The ring flags each stage, because lists that are not valid can alternate between sealed blocks and the caches.
#pragma once

#include "cuda_src/attention/decode/rows.cuh"
#include "cuda_src/attention/inputs/sealed.cuh"
#include "cuda_src/attention/tiles/sealed_numbers.cuh"

namespace pagecore {

template <typename T, int kDim, int kValueDim>
struct SealedTile : DecodeTile<T, kDim, kValueDim> {
  using Keys = SealedKeys<kDim>;
  static constexpr PcRingShape kRing = pc_decode_sealed_ring(kDim, kValueDim);
  static constexpr int kValueWords = Keys::kBytes;  // byte of a stage
  // Rows of even tokens are in different banks.
  static constexpr int kValuePitch = kValueDim / 2 + (kValueDim % 64 == 0 ? 16 : 32);
  static constexpr int kValueScales = kValueWords + 16 * kValuePitch;
  static constexpr int kScalePitch = kValueDim / 16 * 2 * 4 + 4;  // groups have 16 channels or more

  static_assert(kValueScales + 16 * kScalePitch <= kRing.stage_bytes, "a tile fits");
  static_assert(kRing.stages * 4 <= kRing.weight_bytes, "a stage has a flag");
  static_assert(kValueDim % 32 == 0, "rows of codes of 4 bits are whole units of cp.async");
};

// Keys, or values, of a stage.
struct SealedStage {
  Shared<pc_uint8> tile;
  bool is_sealed;
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
    const Shared<pc_uint8> tile = Base::keys(stage, pc_warp());
    if (pc_lane() == 0) {
      flags().store(stage, place.is_sealed ? 1 : 0);  // fault: sealed_flags
    }
    if (!place.is_sealed) {
      copy_rows<Tile>(p, state, this->slots(), tile, Base::values(stage, pc_warp()));
      return;
    }
    copy_keys(sealed_params(p).key, p.head_dim, place, tile);
    copy_values(sealed_params(p).value, p.value_dim, state, tile);
  }

  PC_MEMBER SealedStage keys(int stage) const { return {Base::keys(stage, pc_warp()), flags().load(stage) != 0}; }
  PC_MEMBER SealedStage values(int stage) const { return {Base::values(stage, pc_warp()), flags().load(stage) != 0}; }

 private:
  // Flags of the stages of the warp.
  PC_MEMBER Shared<int> flags() const {
    return (this->shared_ + (Tile::kRing.weights_begin() + pc_warp() * Tile::kRing.weight_bytes)).template as<int>();
  }

  // The place of the tile, from the slot of the first token that the item has.
  PC_MEMBER TilePlace tile_place(const PcAttentionParams& p, const WalkState& state) const {
    const SealedSlot slot = this->slot(p);
    const int first = max_of(state.keys.begin - state.token, 0);
    return {pc_shuffle(slot.block, first), pc_shuffle(slot.offset, first) - first,
            pc_shuffle(slot.is_sealed ? 1 : 0, first) != 0};
  }

  PC_MEMBER static void copy_keys(const PcSealedPlane& key, int dim, const TilePlace& place,
                                  const Shared<pc_uint8>& stage) {
    using Keys = typename Tile::Keys;
    const pc_int64 head = pc_block_y();
    const Global<pc_uint8> words = Global<pc_uint8>(key.words) + head * key.head_stride;
    const Global<pc_uint8> scales = Global<pc_uint8>(key.scales) + head * key.scales_head_stride;
    for (int at = pc_lane(); at < Keys::kUnits; at += 32) {
      if (!Keys::has_unit(key, at)) continue;
      Keys::copy_unit(key, dim, words, scales, place.block, place.offset, at, stage.address(16 * at), true);
    }
  }

  // Tokens that the item does not have become zeros, and so do words past the dims of the call.
  PC_MEMBER void copy_values(const PcSealedPlane& value, int dim, const WalkState& state,
                             const Shared<pc_uint8>& stage) const {
    const SealedValueRow shape(value, dim);
    if (shape.is_whole) {
      copy_words<16>(value, shape, state, stage);
    } else {
      copy_words<4>(value, shape, state, stage);
    }
    for (int at = pc_lane(); at < Tile::kTokens * shape.num_scale_words; at += 32) {
      const int row = at / shape.num_scale_words, byte = at % shape.num_scale_words * 4;
      const Global<pc_uint8> scales(this->slots().load(2 * row));
      const SharedAddress to = stage.address(Tile::kValueScales + row * Tile::kScalePitch + byte);
      const bool exists = state.keys.has(state.token + row);  // fault: sealed_scales_of_other_items
      pc_copy_word_async(to, scales, byte, exists);
    }
  }

  // Starts to copy the words of values in units of kSize bytes.
  template <int kSize>
  PC_MEMBER void copy_words(const PcSealedPlane& value, const SealedValueRow& shape, const WalkState& state,
                            const Shared<pc_uint8>& stage) const {
    // Units of a row, of 4 and of 2 bits: both are constants, so that no division is by a variable.
    constexpr int kUnits = (Tile::kValues / 2 + kSize - 1) / kSize, kHalf = (Tile::kValues / 4 + kSize - 1) / kSize;
    const bool whole = value.bits == 4;
    for (int at = pc_lane(); at < Tile::kTokens * (whole ? kUnits : kHalf); at += 32) {
      const int row = whole ? at / kUnits : at / kHalf, byte = (whole ? at % kUnits : at % kHalf) * kSize;
      const Global<pc_uint8> words(this->slots().load(2 * row + 1));
      const SharedAddress to = stage.address(Tile::kValueWords + row * Tile::kValuePitch + byte);
      const bool has_words = byte < 4 * shape.num_words;  // fault: sealed_values_past_dims
      const bool exists = has_words && state.keys.has(state.token + row);
      if constexpr (kSize == 16) {
        pc_copy_async(to, words, byte, exists);
      } else {
        pc_copy_word_async(to, words, byte, exists);
      }
    }
  }
};

}  // namespace pagecore
