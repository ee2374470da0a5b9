// The ring of general.cu for stored formats: codes and their scales are copied, and widened to float32 in place.
//
//   row of a tile, 4 * kDim bytes    | codes: kDim bytes | unused | scales: from byte 2 * kDim on | unused |
//
// The scales of a row are multiplied in: in float32 that rounds less than any other step.
#pragma once

#include "cuda_src/attention/general/ring.cuh"
#include "cuda_src/device/formats.cuh"

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

  // Starts to copy the scales of the tile's rows; those of tokens that the item does not have, and past the dims,
  // become 0. `slot` is that of token state.token + lane; four lanes share the scales of a token. The threads wait for
  // scales that are not whole words.
  PC_MEMBER void load_scales(const Shared<pc_uint8>& tile, const Slot& slot, const WalkState& state) const {
    const PcScales& stored = stored_.scales;
    if (stored.data == 0) return;
    const int row = pc_lane() / kLanesOfToken, first = pc_lane() % kLanesOfToken;
    const pc_int64 block = pc_shuffle(slot.block, row), offset = pc_shuffle(slot.offset, row);
    const Global<pc_uint8> scales =
        Global<pc_uint8>(stored.data) +
        (block * stored.block_stride + offset * stored.token_stride + pc_block_y() * stored.head_stride);
    const Shared<pc_uint8> held = tile + (row * Tile::kRowBytes + kScales);
    const int num_bytes = state.keys.has(state.token + row) ? pc_scale_bytes(stored_.format, dim_) : 0;
    const pc_uint64 steps = stored.data | stored.block_stride | stored.token_stride | stored.head_stride | num_bytes;
    if (steps % 4 == 0) {
      for (int at = 4 * first; at < kMaxGroups; at += 4 * kLanesOfToken) {
        pc_copy_word_async(held.address(at), scales, at, at < num_bytes);
      }
      return;
    }
    for (int g = first; g < kMaxGroups; g += kLanesOfToken) {
      held.store(g, g < num_bytes ? scales.load(g) : static_cast<pc_uint8>(0));
    }
  }

  // Widens the rows in place: a lane has four adjacent numbers of kTogether rows or parts of rows at a time.
  PC_MEMBER void widen(const Shared<pc_uint8>& tile) const {
    if (stored_.format == PC_PLAIN) {
      if (stored_.type != PC_FLOAT32) widen_rows<kDim>(stored_.type, tile);
      return;
    }
    constexpr int kQuads = kDim / 4, kTogether = kQuads < 64 ? 2 : kQuads / 32;  // whole rows
    static_assert(kTogether * 32 % kQuads == 0 && Tile::kTokens * kQuads % (kTogether * 32) == 0, "a pass has rows");
    PC_NO_UNROLL
    for (int first = pc_lane(); first < Tile::kTokens * kQuads; first += kTogether * 32) {
      pc_vector numbers[kTogether];
      PC_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + 32 * i;
        numbers[i] = widen_quad(stored_.format, tile + at / kQuads * Tile::kRowBytes, at % kQuads);
      }
      pc_sync_warp();  // fault: stored_barrier_before_widening
      PC_UNROLL
      for (int i = 0; i < kTogether; ++i) tile.store_vector(16 * (first + 32 * i), numbers[i]);
    }
    pc_sync_warp();
  }

 private:
  PC_MEMBER static RowSource rows_of(const PcStored& stored, int dim, int kv_head) {
    const int count = pc_is_packed(stored.format) ? dim / 2 : dim;
    return row_source(stored.codes, 1, stored.format == PC_PLAIN ? dim * width_of(stored.type) : count, count, kv_head);
  }

  // Numbers 4 * at .. 4 * at + 3 of a row, which share a scale.
  PC_MEMBER static pc_vector widen_quad(PcFormat format, const Shared<pc_uint8>& row, int at) {
    const bool packed = pc_is_packed(format);
    const pc_uint32 codes = packed ? row.template as<pc_uint16>().load(at) : row.template as<pc_uint32>().load(at);
    CodeScale scale = {1.0f, 0, 0};
    if (pc_has_row_scale(format)) {
      scale = row_scale(format, row.template as<pc_uint32>().load(kScales / 4));
    } else if (pc_group_of(format) != 0) {
      scale = group_scale(format, row.load(kScales + 4 * at / pc_group_of(format)));
    }
    const pc_uint32 low = halves_of_codes(format, codes, scale.zero_point);
    const pc_uint32 high = halves_of_codes(format, codes >> (packed ? 8 : 16), scale.zero_point);
    return {{pc_float_to_bits(low_half(low) * scale.factor), pc_float_to_bits(high_half(low) * scale.factor),
             pc_float_to_bits(low_half(high) * scale.factor), pc_float_to_bits(high_half(high) * scale.factor)}};
  }

  const PcStored& stored_;
  int dim_;
  RowSource rows_;
};

}  // namespace pagecore
