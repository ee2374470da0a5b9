// The tiles of decode.cu: their layout in shared memory, and the copies that fill them.
#pragma once

#include "tile_walk.cuh"
#include "tiles.cuh"

namespace pagecore {

// T: type of the elements. kDim, kValueDim: dims of keys and of values that the instance computes with.
template <typename T, int kDim, int kValueDim>
struct DecodeTile {
  using Element = T;
  using KeyRow = TileRow<kDim>;
  using ValueRow = TileRow<kValueDim>;
  static constexpr PcRingShape kRing = pc_decode_ring(kDim, kValueDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kKeySteps = kDim / 16;  // of matrix instructions
  static constexpr int kValues = kValueDim;
  static constexpr int kValueTiles = kValueDim / 8;  // of O
  static constexpr int kKeyBytes = kTokens * KeyRow::kBytes;
  static constexpr int kLanes = KeyRow::kLanes;    // lanes of a warp that copy a row of keys, and one of values
  static constexpr int kRowsAtOnce = 32 / kLanes;  // rows that a warp copies together
  static constexpr int kCopies = kTokens / kRowsAtOnce;
  // O of a warp at the end of an item, in the stage that was used last.
  static constexpr int kSumsStride = kRing.ring_bytes();
  PC_MEMBER static int sums_begin(int stage) { return stage * kRing.stage_bytes; }

  static_assert(kValueDim <= kDim, "the lanes that copy a row of keys are enough for one of values");
  static_assert(kRing.tile_tokens == kTokens, "a tile has the keys of one m16n8k16 of O += P V");
  static_assert(kRing.stage_bytes == kKeyBytes + kTokens * ValueRow::kBytes, "a stage is a tile of keys and of values");
  static_assert(kRing.stage_bytes >= kRing.warp_rows * kValueDim * 4, "the sums of an item fit in a stage");
};

// A warp's ring of tiles, and the walk that fills it.
template <typename Tile>
class DecodeRing {
  using T = typename Tile::Element;
  using KeyRow = typename Tile::KeyRow;
  using ValueRow = typename Tile::ValueRow;

 public:
  PC_MEMBER DecodeRing(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                       const WorkRange& work)
      : key_(p.key.data),
        value_(p.value.data),
        ring_(shared + pc_warp() * Tile::kRing.ring_bytes()),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {
    key_ = key_ + heads.kv * p.key.head_stride;
    value_ = value_ + heads.kv * p.value.head_stride;
    walk_.start(p, work, 0, heads.count);
  }

  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots_.store(2 * pc_lane(), (key_ + slot_offset(p.key, slot)).address());
      slots_.store(2 * pc_lane() + 1, (value_ + slot_offset(p.value, slot)).address());
    }
    pc_sync_warp();  // fault: decode_barrier_before_copies
    if (!empty) copy(p, stage, state);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return ring_ + stage * Tile::kRing.stage_bytes; }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return keys(stage) + Tile::kKeyBytes; }

  // Waits until the copies of the oldest tile are visible to the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();  // fault: decode_wait
    pc_sync_warp();                       // fault: decode_barrier_after_wait
  }

 private:
  // A lane copies one chunk of every 32 / kLanes rows, of keys and of values. Several slots are loaded before the first
  // copy, because the compiler moves no load of shared memory ahead of a copy. A lane whose chunk lies past the dims of
  // the call writes zeros, as if none of the tokens existed.
  PC_MEMBER void copy(const PcAttentionParams& p, int stage, const WalkState& state) const {
    constexpr int kAhead = Tile::kCopies < 8 ? Tile::kCopies : Tile::KeyRow::kBytes <= 256 ? 8 : 4;
    const int first_row = pc_lane() / Tile::kLanes, chunk = pc_lane() % Tile::kLanes;
    const SharedAddress first_key = keys(stage).address(KeyRow::at(first_row, chunk));
    const SharedAddress first_value = values(stage).address(ValueRow::at(first_row, chunk));
    const KeyRange own_keys = state.keys.only_if(chunk * 8 < p.head_dim);     // fault: decode_keys_past_dims
    const KeyRange own_values = state.keys.only_if(chunk * 8 < p.value_dim);  // fault: decode_values_past_dims
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; i += kAhead) {
      pc_address key[kAhead], value[kAhead];
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int row = first_row + (i + k) * Tile::kRowsAtOnce;
        key[k] = slots_.load(2 * row);
        value[k] = slots_.load(2 * row + 1);
      }
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int rows = (i + k) * Tile::kRowsAtOnce, token = state.token + first_row + rows;
        if (chunk < KeyRow::kChunks) {
          pc_copy_async(KeyRow::below(first_key, rows), Global<pc_uint8>(key[k]), chunk * 16, own_keys.has(token));
        }
        if (chunk < ValueRow::kChunks) {
          const bool valid = own_values.has(token);  // fault: decode_values_of_other_items
          pc_copy_async(ValueRow::below(first_value, rows), Global<pc_uint8>(value[k]), chunk * 16, valid);
        }
      }
    }
  }

  Global<T> key_, value_;  // of the head
  Shared<pc_uint8> ring_;
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

}  // namespace pagecore
