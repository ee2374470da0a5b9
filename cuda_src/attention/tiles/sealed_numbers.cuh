// Numbers of sealed blocks: codes of 2 or 4 bits with the scale and the least number of their group. Keys and values
// may have codes of different bits.
#pragma once

#include "cuda_src/abi/sealed.h"
#include "cuda_src/attention/tiles/tiles.cuh"
#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// The scale and the least number of a group.
struct ScalePair {
  float scale;
  float least;
};

// Two adjacent numbers of a dtype, from number `at` on.
PC_DEVICE void load_two(PcFloat type, const Shared<pc_uint8>& row, int at, float& x, float& y) {
  if (type == PC_FLOAT32) {
    x = row.template as<float>().load(at);
    y = row.template as<float>().load(at + 1);
    return;
  }
  const pc_uint32 pair = row.template as<pc_uint32>().load(at / 2);
  x = type == PC_FLOAT16 ? low_of<pc_half>(pair) : low_of<pc_bfloat16>(pair);
  y = type == PC_FLOAT16 ? high_of<pc_half>(pair) : high_of<pc_bfloat16>(pair);
}

// Words and scales of the keys of 16 tokens, which are in one block and in one group, in shared memory:
//
//   words   [2][kDim]                16 or 8 tokens of a channel; of 2 bits one row
//   scales  [2][kDim], 4 bytes each  scale and least number of up to 4 bytes
//
// Dims past those of the call have words and scales of zero.
template <int kDim>
struct SealedKeys {
  static constexpr int kUnitsOfRow = kDim / 4;  // of 16 bytes
  static constexpr int kUnits = 4 * kUnitsOfRow;
  static constexpr int kRowBytes = kDim * 4;
  static constexpr int kBytes = 4 * kRowBytes;

  // The scales of a unit.
  PC_MEMBER static int scales_of_unit(const PcSealedPlane& key) { return key.scale_type == PC_FLOAT32 ? 4 : 8; }

  // Returns true if codes and scales of these types have unit `at`: of 2 bits there is one row of words, and scales of
  // 2 bytes are half of a row.
  PC_MEMBER static bool has_unit(const PcSealedPlane& key, int at) {
    const int row = at / kUnitsOfRow;
    return row < 2 ? row < key.bits / 2 : at % kUnitsOfRow * scales_of_unit(key) < kDim;
  }

  // Starts to copy unit `at` of the tokens from `offset` on, a multiple of 16, of a block; zeros if they do not exist.
  // `words` and `scales` are those of the head.
  PC_MEMBER static void copy_unit(const PcSealedPlane& key, int dim, const Global<pc_uint8>& words,
                                  const Global<pc_uint8>& scales, int block, int offset, int at,
                                  const SharedAddress& to, bool exists) {
    const int row = at / kUnitsOfRow, unit = at % kUnitsOfRow;
    if (row < 2) {
      const pc_int64 word_row = offset / 16 * (key.bits / 2) + row;
      const pc_int64 from = block * key.block_stride + word_row * key.row_stride + unit * 16;
      pc_copy_async(to, words, from, exists && 4 * unit < dim);  // fault: sealed_words_past_dims
      return;
    }
    const pc_int64 from = block * key.scales_block_stride + offset / key.group * key.scales_row_stride +
                          (row - 2) * key.least_stride + unit * 16;
    const bool has_scales = exists && unit * scales_of_unit(key) < dim;  // fault: sealed_key_scales_past_dims
    pc_copy_async(to, scales, from, has_scales);
  }
};

// The rows of values of a call.
struct SealedValueRow {
  int num_words;
  int num_scale_words;  // scales and least numbers
  bool is_whole;        // every row consists of aligned units of 16 bytes; if not, units of 4 bytes are copied

  PC_MEMBER SealedValueRow(const PcSealedPlane& value, int dim)
      : num_words(dim * value.bits / 32),
        num_scale_words(dim / value.group * (value.scale_type == PC_FLOAT32 ? 2 : 1)),
        is_whole((static_cast<pc_uint32>(value.words | value.block_stride | value.row_stride | value.head_stride |
                                         4 * num_words) &
                  15) == 0) {}
};

// The number of a code.
PC_DEVICE float number_of_code(pc_uint32 code, const ScalePair& pair) {
  constexpr pc_uint32 kMagic = 0x4b000000u;  // 2^23: the last bits are an integer
  return pc_fma(pc_bits_to_float(kMagic | code) - 8388608.0f, pair.scale, pair.least);
}

// A number in the range of T: its rounded scale and least number can take it past the largest float16.
template <typename T>
PC_DEVICE float in_range_of(float x) {
  if (!IsSame<T, pc_half>::kValue || magnitude_of(x) <= 65504.0f || magnitude_of(x) >= 131008.0f) return x;
  return x < 0.0f ? -65504.0f : 65504.0f;
}

}  // namespace pagecore
