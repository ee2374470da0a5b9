// The ring of general.cu for stored formats: codes and their scales are copied, and widened to float32 in place.
//
//   row of a tile, 4 * kDim bytes    | codes: kDim bytes | unused | scales: from byte 2 * kDim on | unused |
//
// The scales of a row are multiplied in: in float32 that rounds less than any other step.
#pragma once

#include "formats.cuh"
#include "general_ring.cuh"

namespace pagecore {

// Keys or values of a cache, of a format or of floats. Strides of its planes count bytes.
template <int kDim>
class StoredPlane {
  using Tile = GeneralTile<kDim>;
  static constexpr int kScales = 2 * kDim;  // byte of a row
  static constexpr int kMaxGroups = kDim / 16;
  static constexpr int kLanesOfToken = 32 / Tile::kTokens;

 public:
  static constexpr bool kHasScales = true;

  PC_MEMBER StoredPlane(const PcStored& stored, int dim, int kv_head)
      : stored_(stored), dim_(dim), rows_(rows_of(stored, dim, kv_head)) {}

  PC_MEMBER pc_address address(const Slot& slot) const {
    return (rows_.data + slot_offset(stored_.codes, slot)).address();
  }

  PC_MEMBER void copy(const Shared<pc_address>& slots, const Shared<pc_uint8>& tile, int which,
                      const WalkState& state) const {
    if (stored_.format != PC_PLAIN) {
      copy_elements<kDim, pc_uint8>(rows_, slots, tile, which, state);
    } else {
      copy_floats<kDim>(stored_.type, rows_, slots, tile, which, state);
    }
  }

  // Stores the scales of the tile's rows; those of tokens that the item does not have, and past the dims, become 0.
  // `slot` is that of token state.token + lane; four lanes share the scales of a token.
  PC_MEMBER void load_scales(const Shared<pc_uint8>& tile, const Slot& slot, const WalkState& state) const {
    if (stored_.scales.data == 0) return;
    const int row = pc_lane() / kLanesOfToken, first = pc_lane() % kLanesOfToken;
    const pc_int64 block = pc_shuffle(slot.block, row), offset = pc_shuffle(slot.offset, row);
    const bool exists = state.keys.has(state.token + row);
    const Global<pc_uint8> scales = Global<pc_uint8>(stored_.scales.data) +
                                    (block * stored_.scales.block_stride + offset * stored_.scales.token_stride +
                                     pc_block_y() * stored_.scales.head_stride);
    const Shared<pc_uint8> held = tile + (row * Tile::kRowBytes + kScales);
    if (pc_has_row_scale(stored_.format)) {
      if (first == 0) held.template as<pc_uint32>().store(0, exists ? scales.template as<pc_uint32>().load(0) : 0);
      return;
    }
    const int groups = exists ? dim_ / pc_group_of(stored_.format) : 0;
    for (int g = first; g < kMaxGroups; g += kLanesOfToken) {
      held.store(g, g < groups ? scales.load(g) : static_cast<pc_uint8>(0));
    }
  }

  // Widens each row in place.
  PC_MEMBER void widen(const Shared<pc_uint8>& tile) const {
    if (stored_.format == PC_PLAIN) {
      if (stored_.type != PC_FLOAT32) widen_rows<kDim>(stored_.type, tile);
      return;
    }
    constexpr int kPairs = kDim / 64;  // of a lane
    for (int row = 0; row < Tile::kTokens; ++row) {
      const Shared<pc_uint8> bytes = tile + row * Tile::kRowBytes;
      pc_uint64 numbers[kPairs];
      PC_UNROLL
      for (int i = 0; i < kPairs; ++i) numbers[i] = widen_pair(stored_.format, bytes, i * 32 + pc_lane());
      pc_sync_warp();  // fault: stored_barrier_before_widening
      PC_UNROLL
      for (int i = 0; i < kPairs; ++i) bytes.template as<pc_uint64>().store(i * 32 + pc_lane(), numbers[i]);
    }
    pc_sync_warp();
  }

 private:
  PC_MEMBER static RowSource rows_of(const PcStored& stored, int dim, int kv_head) {
    const int count = pc_is_packed(stored.format) ? dim / 2 : dim;
    return row_source(stored.codes, 1, stored.format == PC_PLAIN ? dim * width_of(stored.type) : count, count, kv_head);
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

  const PcStored& stored_;
  int dim_;
  RowSource rows_;
};

}  // namespace pagecore
