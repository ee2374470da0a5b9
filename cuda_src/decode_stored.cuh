// Stored formats in decode.cu: rings of codes and scales, which a warp unpacks to the 16-bit tiles that it multiplies.
//
//   ring     [stages][key codes, value codes, key scales, value scales]    3 stages of 8 bits a number, or 6 of 4
//              |
//              | a warp unpacks 16 keys and 16 values, 8 numbers of a lane at a time (stored_unpack.cuh)
//              v
//   tile     [32, kDim] of T, rows as in decode_ring.cuh    ldmatrix
//
// Scales of groups are multiplied in while codes are unpacked, which rounds nothing. Scales of rows are exact only in
// float32: those of keys are factors of the columns of S, and those of values of the columns of P (stored_rows.cuh).
#pragma once

#include "decode_rows.cuh"
#include "formats.cuh"
#include "stored_shape.h"
#include "units.cuh"

namespace pagecore {

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
  static constexpr int kLanes = kCodeBytes / 16;   // lanes of a warp that copy the codes of a row
  static constexpr int kRowsAtOnce = 32 / kLanes;  // rows that a warp copies together
  static constexpr int kCopies = kTokens / kRowsAtOnce;
  static constexpr int kTileBytes = kShape.tile_bytes();
  static constexpr int kFactorsBegin = kRing.weights_begin() + kWarps * kTokens * 16;
  static constexpr int kUnitsBegin = kFactorsBegin + 16 * 4;
  static constexpr bool kIsHalf = IsSame<T, pc_half>::kValue;  // else no format has row scales, nor a row a factor
  // O of a warp at the end of an item, in its unpacked tiles.
  static constexpr int kSumsStride = 2 * kTileBytes;
  PC_MEMBER static int sums_begin(int) { return kRing.queries_begin() + kTileBytes; }

  static_assert(kChunks == KeyRow::kChunks, "a row has no padding");
  static_assert(kRing.stage_bytes % 128 == 0, "unpacked rows begin at a multiple of 128");
  static_assert(kSumsStride >= kRing.warp_rows * kDim * 4, "the sums of an item fit in the unpacked tiles");
};

// Keys or values of a stage.
struct StoredPart {
  Shared<pc_uint8> codes;
  Shared<pc_uint8> scales;
  Shared<pc_uint8> tile;  // unpacked
  PcFormat format;
};

// The values of the stage of some keys.
template <typename Tile>
PC_DEVICE StoredPart values_of(const StoredPart& keys) {
  return {keys.codes + Tile::kTokens * Tile::kCodeBytes, keys.scales + Tile::kTokens * Tile::kScaleBytes,
          keys.tile + Tile::kTileBytes, keys.format};
}

// A warp's ring of tiles, and the walk that fills it.
template <typename Tile>
class DecodeStoredRing {
 public:
  PC_MEMBER DecodeStoredRing(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                             const WorkRange& work)
      : p_(p), shared_(shared), walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {
    walk_.start(p.attention, work, 0, heads.count);
  }

  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots().store(2 * pc_lane(), codes_at(p_.key, slot));
      slots().store(2 * pc_lane() + 1, codes_at(p_.value, slot));
      if (has_scales()) {
        scale_slots().store(2 * pc_lane(), scales_at(p_.key, slot));
        scale_slots().store(2 * pc_lane() + 1, scales_at(p_.value, slot));
      }
    }
    pc_sync_warp();  // fault: decode_stored_barrier_before_copies
    if (!empty) {
      copy_codes(p, stage, state);
      if (has_scales()) copy_scales(p, stage, state);
    }
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER StoredPart keys(int stage) const {
    const Shared<pc_uint8> codes = shared_ + (pc_warp() * Tile::kRing.ring_bytes() + stage * Tile::kRing.stage_bytes);
    const Shared<pc_uint8> tile = shared_ + (Tile::sums_begin(0) + pc_warp() * Tile::kSumsStride);
    return {codes, codes + 2 * Tile::kTokens * Tile::kCodeBytes, tile, p_.key.format};
  }
  PC_MEMBER StoredPart values(int stage) const { return values_of<Tile>(keys(stage)); }

  // Waits until the copies of the oldest tile are visible to the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();  // fault: decode_stored_wait
    pc_sync_warp();                       // fault: decode_stored_barrier_after_wait
  }

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

  // A lane copies one chunk of every kRowsAtOnce-th row, of keys and of values; zeros past the dims of the call.
  PC_MEMBER void copy_codes(const PcAttentionParams& p, int stage, const WalkState& state) const {
    const int first_row = pc_lane() / Tile::kLanes, byte = pc_lane() % Tile::kLanes * 16;
    const SharedAddress first = keys(stage).codes.address(first_row * Tile::kCodeBytes + byte);
    const int key_bytes = p.head_dim * Tile::kNumBits / 8, value_bytes = p.value_dim * Tile::kNumBits / 8;
    const KeyRange own_keys = state.keys.only_if(byte < key_bytes);      // fault: stored_keys_past_dims
    const KeyRange own_values = state.keys.only_if(byte < value_bytes);  // fault: stored_values_past_dims
    constexpr int kAhead = Tile::kValues == 256 ? 2 : Tile::kCopies;
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; i += kAhead) {
      pc_address key[kAhead], value[kAhead];
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        key[k] = slots().load(2 * (first_row + (i + k) * Tile::kRowsAtOnce));
        value[k] = slots().load(2 * (first_row + (i + k) * Tile::kRowsAtOnce) + 1);
      }
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int rows = (i + k) * Tile::kRowsAtOnce, token = state.token + first_row + rows;
        const SharedAddress target = first + rows * Tile::kCodeBytes;
        pc_copy_async(target, Global<pc_uint8>(key[k]), byte, own_keys.has(token));
        pc_copy_async(target + Tile::kTokens * Tile::kCodeBytes, Global<pc_uint8>(value[k]), byte,
                      own_values.has(token));
      }
    }
  }

  // A lane copies words of scales; zeros past those of the call and for tokens that the item does not have.
  PC_MEMBER void copy_scales(const PcAttentionParams& p, int stage, const WalkState& state) const {
    constexpr int kWords = Tile::kScaleBytes / 4;
    const int key_bytes = pc_scale_bytes(p_.key.format, p.head_dim);
    const int value_bytes = pc_scale_bytes(p_.value.format, p.value_dim);
    for (int at = pc_lane(); at < Tile::kTokens * kWords; at += 32) {
      const int row = at / kWords, byte = at % kWords * 4;
      const bool exists = state.keys.has(state.token + row);
      const SharedAddress target = keys(stage).scales.address(4 * at);
      const Global<pc_uint8> key(scale_slots().load(2 * row)), value(scale_slots().load(2 * row + 1));
      pc_copy_word_async(target, key, byte, exists && byte < key_bytes);
      pc_copy_word_async(target + Tile::kTokens * Tile::kScaleBytes, value, byte, exists && byte < value_bytes);
    }
  }

  PC_MEMBER bool has_scales() const { return !Tile::kIsHalf || p_.key.scales.data != 0; }

  // Addresses of the codes, and of the scales, of the tokens of a tile: of keys and of values, alternating.
  PC_MEMBER Shared<pc_address> slots() const {
    return (shared_ + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>();
  }
  PC_MEMBER Shared<pc_address> scale_slots() const {
    return (shared_ + (Tile::kRing.weights_begin() + pc_warp() * Tile::kTokens * 16)).template as<pc_address>();
  }

  const PcStoredAttentionParams& p_;
  Shared<pc_uint8> shared_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

}  // namespace pagecore
