// Unpacked tiles of decode.cu: codes of a stage of decode_stored.cuh become the 16-bit rows that a warp multiplies.
#pragma once

#include "decode_stored.cuh"

namespace pagecore {

// Two codes, in the lowest bits of `codes`, as elements of T.
template <typename T, PcFormat kFormat>
PC_DEVICE pc_uint32 unpack_pair(pc_uint32 codes, const CodeScale& scale) {
  const pc_uint32 halves = halves_of_codes(kFormat, codes, scale.zero_point);
  if constexpr (kFormat == PC_FP4_BLOCK16 || kFormat == PC_MXFP8) {
    return pc_pack<T>(low_half(halves) * scale.factor, high_half(halves) * scale.factor);
  } else if constexpr (kFormat == PC_NVFP4) {
    return pc_fma_halves(halves, scale.halves, 0x80008000u);
  } else {
    return halves;
  }
}

// Unpacks chunk `at` of a tile, 8 numbers.
template <typename Tile, PcFormat kFormat>
PC_DEVICE void unpack_chunk(const StoredPart& part, int at) {
  using Row = typename Tile::KeyRow;
  constexpr int kGroup = pc_group_of(kFormat);
  const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
  pc_uint64 codes = 0;
  if constexpr (Tile::kNumBits == 8) {
    codes = part.codes.template as<pc_uint64>().load(at);
  } else {
    codes = part.codes.template as<pc_uint32>().load(at);
  }
  CodeScale scale = {1.0f, 0, 0};
  if constexpr (kGroup != 0) {
    scale = group_scale(kFormat, part.scales.load(row * Tile::kScaleBytes + chunk * 8 / kGroup));
  } else if constexpr (kFormat == PC_I4_TOKEN) {
    scale = row_scale(kFormat, part.scales.template as<pc_uint32>().load(row * (Tile::kScaleBytes / 4)));
  }
  pc_vector v;
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    const pc_uint32 pair = static_cast<pc_uint32>(codes >> (2 * Tile::kNumBits * k));
    v.word[k] = unpack_pair<typename Tile::Element, kFormat>(pair, scale);
  }
  part.tile.store_vector(Row::at(row, chunk), v);
}

// A lane loads the codes of kAhead chunks before it stores any.
template <typename Tile, PcFormat kFormat>
PC_DEVICE void unpack_tile(const StoredPart& part) {
  constexpr int kAhead = 4;
  PC_NO_UNROLL
  for (int first = pc_lane(); first < 2 * Tile::kTokens * Tile::kChunks; first += 32 * kAhead) {
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) unpack_chunk<Tile, kFormat>(part, first + 32 * i);
  }
}

// Unpacks the keys of a stage, and the values, which follow them in every array.
template <typename Tile>
PC_DEVICE void unpack(const StoredPart& part) {
  if constexpr (!Tile::kIsHalf) {
    return unpack_tile<Tile, Tile::kNumBits == 8 ? PC_MXFP8 : PC_FP4_BLOCK16>(part);
  } else if constexpr (Tile::kNumBits == 4) {
    if (part.format == PC_NVFP4) return unpack_tile<Tile, PC_NVFP4>(part);
    return unpack_tile<Tile, PC_I4_TOKEN>(part);
  } else {
    if (part.format == PC_I8_TOKEN) return unpack_tile<Tile, PC_I8_TOKEN>(part);
    if (part.format == PC_E5M2) return unpack_tile<Tile, PC_E5M2>(part);
    return unpack_tile<Tile, PC_E4M3>(part);
  }
}

}  // namespace pagecore
