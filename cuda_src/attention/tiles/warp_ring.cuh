// The ring of tiles of a warp in decode.cu and general.cu: the order of its copies, and the wait for them.
//
//   fill    locate   a lane has the slot of one token, and stores the addresses of its rows
//           copy     a lane copies chunks of several rows to a stage, of keys and of values
//           commit   one group of copies for each tile
//   wait    for the oldest group
#pragma once

#include "cuda_src/attention/tiles/tile_walk.cuh"
#include "cuda_src/attention/tiles/tiles.cuh"

namespace pagecore {

// A ring derives from WarpRing<Ring, Tile>. `Tile` has the shape of the ring, and the first byte of the values of a
// stage, kValuesBegin. The ring has two functions for tiles with keys of their item:
//
//   locate(p, state, stage)   store the addresses that `copy` loads in other lanes. slot() is the slot of token
//                             state.token + lane. Lanes from kTokens on call it too if Ring::kAllLanesLocate
//   copy(p, state, stage)     start the copies, after a barrier of the warp
template <typename Ring, typename Tile>
class WarpRing {
 public:
  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const Ring& ring = static_cast<const Ring&>(*this);
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty && (Ring::kAllLanesLocate || pc_lane() < Tile::kTokens)) ring.locate(p, state, stage);
    pc_sync_warp();  // fault: ring_barrier_before_copies
    if (!empty) ring.copy(p, state, stage);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  // Waits until the copies of the oldest tile are visible to the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();  // fault: ring_wait
    pc_sync_warp();                       // fault: ring_barrier_after_wait
  }

  // Keys, and values, of a stage of a warp.
  PC_MEMBER Shared<pc_uint8> keys(int stage, int warp) const {
    return shared_ + (warp * Tile::kRing.ring_bytes() + stage * Tile::kRing.stage_bytes);
  }
  PC_MEMBER Shared<pc_uint8> values(int stage, int warp) const { return keys(stage, warp) + Tile::kValuesBegin; }

 protected:
  PC_MEMBER explicit WarpRing(const Shared<pc_uint8>& shared)
      : shared_(shared),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {}

  // Moves to the first item that has packed rows from `first_row` on. `heads`: rows of a query.
  PC_MEMBER void start_walk(const PcAttentionParams& p, const WorkRange& work, int first_row, int heads) {
    walk_.start(p, work, first_row, heads);
  }

  // Addresses of the rows of a tile: of keys and of values, alternating.
  PC_MEMBER Shared<pc_address> slots() const { return slots_; }

  // Stores the address of a row of the lane's token; `which`: 0 for keys, 1 for values.
  PC_MEMBER static void store_address(const Shared<pc_address>& slots, int which, pc_address row) {
    slots.store(2 * pc_lane() + which, row);
  }

  // The slot of token state().token + lane.
  PC_MEMBER auto slot(const PcAttentionParams& p) const { return walk_.slot(p); }

  Shared<pc_uint8> shared_;  // of the block

 private:
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps, typename Tile::Options> walk_;
};

// Starts to copy the rows of a tile of decode.cu to the keys and values of a stage. A lane copies one chunk of every 32
// / kLanes rows, of keys and of values. Several slots are loaded before the first copy, because the compiler moves no
// load of shared memory ahead of a copy. A lane whose chunk lies past the dims of the call writes zeros, as if none of
// the tokens existed.
template <typename Tile>
PC_DEVICE void copy_rows(const PcAttentionParams& p, const WalkState& state, const Shared<pc_address>& slots,
                         const Shared<pc_uint8>& keys, const Shared<pc_uint8>& values) {
  using KeyRow = typename Tile::StoredKeyRow;
  using ValueRow = typename Tile::StoredValueRow;
  constexpr int kLanes = KeyRow::kLanes, kRowsAtOnce = 32 / kLanes, kCopies = Tile::kTokens / kRowsAtOnce;
  constexpr int kAhead = Tile::kAhead < kCopies ? Tile::kAhead : kCopies;
  const int first_row = pc_lane() / kLanes, chunk = pc_lane() % kLanes;
  const SharedAddress first_key = keys.address(KeyRow::at(first_row, chunk));
  const SharedAddress first_value = values.address(ValueRow::at(first_row, chunk));
  const KeyRange own_keys = state.keys.only_if(Tile::has_chunk(chunk, p.head_dim));     // fault: keys_past_dims
  const KeyRange own_values = state.keys.only_if(Tile::has_chunk(chunk, p.value_dim));  // fault: values_past_dims
  PC_UNROLL
  for (int i = 0; i < kCopies; i += kAhead) {
    pc_address key[kAhead], value[kAhead];
    PC_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const int row = first_row + (i + k) * kRowsAtOnce;
      key[k] = slots.load(2 * row);
      value[k] = slots.load(2 * row + 1);
    }
    PC_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const int rows = (i + k) * kRowsAtOnce, token = state.token + first_row + rows;
      if (chunk < KeyRow::kChunks) {
        pc_copy_async(KeyRow::below(first_key, rows), Global<pc_uint8>(key[k]), chunk * 16, own_keys.has(token));
      }
      if (chunk < ValueRow::kChunks) {
        const bool valid = own_values.has(token);  // fault: values_of_other_items
        pc_copy_async(ValueRow::below(first_value, rows), Global<pc_uint8>(value[k]), chunk * 16, valid);
      }
    }
  }
}

}  // namespace pagecore
