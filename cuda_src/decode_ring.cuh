// The tiles of decode.cu: where they lie in shared memory, and what brings them there.
#pragma once

#include "tile_walk.cuh"

namespace pagecore {

template <int kDim>
struct DecodeTile {
  static constexpr PcRingShape kRing = pc_decode_ring(kDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kPlaneBytes = kTokens * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kChunks;  // that a warp copies
  static constexpr int kCopies = kTokens / kRowsAtOnce;

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kPlaneBytes, "");
  static_assert(kRing.stage_bytes == kRing.warp_rows * kDim * 4, "the sums of an item lie in a stage");

  PC_MEMBER static int next(int stage) { return stage == kStages - 1 ? 0 : stage + 1; }

  // Where chunk c of row r lies, and how an address is moved on: r by a multiple of a power of two above it, c by an
  // even number. Those of a lane differ by constants, so that one register serves them all.
  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
  PC_MEMBER static SharedAddress below(SharedAddress address, int rows) {
    return (address ^ ((rows & 7) << 4)) + rows * kRowBytes;
  }
  PC_MEMBER static SharedAddress right_of(SharedAddress address, int chunks) {
    return (address ^ ((chunks & 7) << 4)) + ((chunks & ~7) << 4);
  }
};

// A warp's ring and what fills it.
template <typename T, int kDim>
class DecodeRing {
  using Tile = DecodeTile<kDim>;

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

  // Begins to fill a stage with the next tile, behind a barrier of the warp; always one group of copies.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.meets(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots_.store(2 * pc_lane(), (key_ + slot_offset(p.key, slot)).address());
      slots_.store(2 * pc_lane() + 1, (value_ + slot_offset(p.value, slot)).address());
    }
    pc_sync_warp();
    if (!empty) copy(stage, state);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return ring_ + stage * Tile::kRing.stage_bytes; }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return keys(stage) + Tile::kPlaneBytes; }

  // Until the oldest tile is there for the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();
    pc_sync_warp();
  }

 private:
  // A lane copies one chunk of every 32 / kChunks rows, of keys and of values. Several slots are read before any copy
  // begins: behind one, no read of shared memory is moved forward.
  PC_MEMBER void copy(int stage, const WalkState& state) const {
    constexpr int kAhead = Tile::kCopies < 8 ? Tile::kCopies : kDim <= 128 ? 8 : 4;
    const int first_row = pc_lane() / Tile::kChunks, chunk = pc_lane() % Tile::kChunks;
    const SharedAddress first = keys(stage).address(Tile::at(first_row, chunk));
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
        const int rows = (i + k) * Tile::kRowsAtOnce;
        const bool valid = state.keys.has(state.token + first_row + rows);
        const SharedAddress to = Tile::below(first, rows);
        pc_copy_async(to, Global<pc_uint8>(key[k]), chunk * 16, valid);
        pc_copy_async(to + Tile::kPlaneBytes, Global<pc_uint8>(value[k]), chunk * 16, valid);
      }
    }
  }

  Global<T> key_, value_;  // of the head
  Shared<pc_uint8> ring_;
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

}  // namespace pagecore
