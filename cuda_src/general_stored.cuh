// The ring of general.cu for stored formats: codes and their scales are copied, and widened to float32 in place.
//
//   row of a tile, 4 * kDim bytes    | codes: kDim bytes | unused | scales: from byte 2 * kDim on | unused |
//
// The scales of a row are multiplied in: in float32 that rounds less than any other step.
#pragma once

#include "formats.cuh"
#include "general_ring.cuh"

namespace pagecore {

// A stored plane as the copies of plain rows take it; its elements are bytes.
PC_DEVICE GeneralPlane make_stored_plane(const PcStored& stored, int dim, int kv_head) {
  GeneralPlane plane;
  const int element = stored.type == PC_FLOAT32 ? 4 : 2;
  plane.type = stored.type;
  plane.dim = stored.format == PC_PLAIN ? dim : pc_is_packed(stored.format) ? dim / 2 : dim;
  plane.data = Global<pc_uint8>(stored.codes.data) + kv_head * stored.codes.head_stride;
  const int bytes = stored.format == PC_PLAIN ? dim * element : plane.dim;
  const pc_uint64 strides = stored.codes.block_stride | stored.codes.token_stride | stored.codes.head_stride | bytes;
  plane.in_vectors = ((strides | stored.codes.data) & 15) == 0;
  return plane;
}

// A warp's ring of tiles, and the walk that fills it. Like GeneralRing, but strides of the planes count bytes.
template <int kDim>
class StoredRing {
  using Tile = GeneralTile<kDim>;
  static constexpr int kScales = 2 * kDim;  // byte of a row
  static constexpr int kMaxGroups = kDim / 16;
  static constexpr int kLanesOfToken = 32 / Tile::kTokens;

 public:
  PC_MEMBER StoredRing(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads)
      : p_(p),
        key_(make_stored_plane(p.key, p.attention.head_dim, heads.kv)),
        value_(make_stored_plane(p.value, p.attention.value_dim, heads.kv)),
        rings_(shared),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {}

  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, const GeneralBlock<kDim>& block) {
    walk_.start(p, work, block.first_row, block.heads);
  }

  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty) {
      const Slot slot = walk_.slot(p);
      if (pc_lane() < Tile::kTokens) {
        slots_.store(2 * pc_lane(), (key_.data + slot_offset(p_.key.codes, slot)).address());
        slots_.store(2 * pc_lane() + 1, (value_.data + slot_offset(p_.value.codes, slot)).address());
      }
      load_scales(p_.key, p.head_dim, keys(stage, pc_warp()), slot, state);
      load_scales(p_.value, p.value_dim, values(stage, pc_warp()), slot, state);
    }
    pc_sync_warp();  // fault: stored_barrier_before_copies
    if (!empty) copy(p_.key, key_, keys(stage, pc_warp()), 0, state);
    if (!empty) copy(p_.value, value_, values(stage, pc_warp()), 1, state);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage, int warp) const {
    return rings_ + (warp * Tile::kRing.ring_bytes() + stage * Tile::kRing.stage_bytes);
  }
  PC_MEMBER Shared<pc_uint8> values(int stage, int warp) const { return keys(stage, warp) + Tile::kPlaneBytes; }

  // Waits for the warp's own tile of the oldest round, and widens it to float32 if it is wanted.
  PC_MEMBER void wait(int stage, bool wanted) const {
    pc_wait_copies<Tile::kStages - 1>();
    pc_sync_warp();
    if (wanted) widen(p_.key, keys(stage, pc_warp()));
    if (wanted) widen(p_.value, values(stage, pc_warp()));
  }

 private:
  PC_MEMBER void copy(const PcStored& stored, const GeneralPlane& plane, const Shared<pc_uint8>& target, int which,
                      const WalkState& state) const {
    if (stored.format != PC_PLAIN) {
      copy_rows<kDim, pc_uint8>(plane, slots_, target, which, state);
    } else if (plane.type == PC_FLOAT32) {
      copy_rows<kDim, pc_uint32>(plane, slots_, target, which, state);
    } else {
      copy_rows<kDim, pc_uint16>(plane, slots_, target, which, state);
    }
  }

  // Stores the scales of the tile's rows; those of tokens that the item does not have, and past the dims, become 0.
  // `slot` is that of token state.token + lane; four lanes share the scales of a token.
  PC_MEMBER static void load_scales(const PcStored& stored, int dim, const Shared<pc_uint8>& target, const Slot& slot,
                                    const WalkState& state) {
    if (stored.scales.data == 0) return;
    const int row = pc_lane() / kLanesOfToken, first = pc_lane() % kLanesOfToken;
    const pc_int64 block = pc_shuffle(slot.block, row), offset = pc_shuffle(slot.offset, row);
    const bool exists = state.keys.has(state.token + row);
    const Global<pc_uint8> scales =
        Global<pc_uint8>(stored.scales.data) + (block * stored.scales.block_stride +
                                                offset * stored.scales.token_stride +
                                                pc_block_y() * stored.scales.head_stride);
    const Shared<pc_uint8> held = target + (row * Tile::kRowBytes + kScales);
    if (pc_has_row_scale(stored.format)) {
      if (first == 0) held.template as<pc_uint32>().store(0, exists ? scales.template as<pc_uint32>().load(0) : 0);
      return;
    }
    const int groups = exists ? dim / pc_group_of(stored.format) : 0;
    for (int g = first; g < kMaxGroups; g += kLanesOfToken) {
      held.store(g, g < groups ? scales.load(g) : static_cast<pc_uint8>(0));
    }
  }

  // Widens each row in place.
  PC_MEMBER static void widen(const PcStored& stored, const Shared<pc_uint8>& tile) {
    if (stored.format == PC_PLAIN) {
      if (stored.type != PC_FLOAT32) widen_rows<kDim>(stored.type, tile);
      return;
    }
    constexpr int kPairs = kDim / 64;  // of a lane
    for (int row = 0; row < Tile::kTokens; ++row) {
      const Shared<pc_uint8> bytes = tile + row * Tile::kRowBytes;
      pc_uint64 numbers[kPairs];
      PC_UNROLL
      for (int i = 0; i < kPairs; ++i) numbers[i] = widen_pair(stored.format, bytes, i * 32 + pc_lane());
      pc_sync_warp();  // fault: stored_barrier_before_widening
      PC_UNROLL
      for (int i = 0; i < kPairs; ++i) bytes.template as<pc_uint64>().store(i * 32 + pc_lane(), numbers[i]);
    }
    pc_sync_warp();  // fault: stored_barrier_after_widening
  }

  // Numbers 2 * at and 2 * at + 1 of a row.
  PC_MEMBER static pc_uint64 widen_pair(PcFormat format, const Shared<pc_uint8>& row, int at) {
    const pc_uint32 codes = pc_is_packed(format) ? row.load(at) : row.template as<pc_uint16>().load(at);
    CodeScale scale = {1.0f, 0, 0};
    if (pc_has_row_scale(format)) {
      scale = row_scale(format, row.template as<pc_uint32>().load(kScales / 4));
    } else if (pc_group_of(format) != 0) {
      scale = group_scale(format, row.load(kScales + 2 * at / pc_group_of(format)));
    }
    const pc_uint32 halves = halves_of_codes(format, codes, scale.zero_point);
    const pc_uint64 low = pc_float_to_bits(low_half(halves) * scale.factor);
    return low | static_cast<pc_uint64>(pc_float_to_bits(high_half(halves) * scale.factor)) << 32;
  }

  const PcStoredAttentionParams& p_;
  GeneralPlane key_, value_;
  Shared<pc_uint8> rings_;  // of all warps
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

}  // namespace pagecore
