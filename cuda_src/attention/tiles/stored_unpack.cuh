// Unpacking of stored codes in shared memory, to the 16-bit rows that decode.cu and prefill.cu multiply.
#pragma once

#include "cuda_src/attention/tiles/tiles.cuh"
#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// Keys or values of a tile.
struct StoredPart {
  Shared<pc_uint8> codes;   // [tokens, kCodeBytes]
  Shared<pc_uint8> scales;  // [tokens, kScaleBytes]
  Shared<pc_uint8> tile;    // unpacked rows
  PcFormat format;
};

// Two codes, in the lowest bits of `codes`, as elements of T. Both types hold every code, times the scale of its group
// where the format has any; halves hold none of a UE8M0 scale.
template <typename T, PcFormat kFormat>
PC_DEVICE pc_uint32 unpack_pair(pc_uint32 codes, const CodeScale& scale) {
  const pc_uint32 halves = halves_of_codes(kFormat, codes, scale.zero_point);
  if constexpr (kFormat == PC_FP4_BLOCK16 || kFormat == PC_MXFP8) {
    return pc_pack<T>(low_half(halves) * scale.factor, high_half(halves) * scale.factor);
  } else if constexpr (IsSame<T, pc_half>::kValue) {
    return kFormat == PC_NVFP4 ? pc_fma_halves(halves, scale.halves, 0x80008000u) : halves;
  } else {
    const float factor = kFormat == PC_NVFP4 ? scale.factor : 1.0f;
    return pc_pack<T>(low_half(halves) * factor, high_half(halves) * factor);
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

// Unpacks kRows rows, chunks `first`, `first` + kStep and so on. A lane loads the codes of several chunks before it
// stores any.
template <typename Tile, int kRows, int kStep, PcFormat kFormat>
PC_DEVICE void unpack_rows(const StoredPart& part, int first) {
  constexpr int kOwn = kRows * Tile::kChunks / kStep, kAhead = kOwn < 4 ? kOwn : 4;
  static_assert(kOwn * kStep == kRows * Tile::kChunks && kOwn % kAhead == 0, "a lane has whole groups of chunks");
  PC_NO_UNROLL
  for (; first < kRows * Tile::kChunks; first += kStep * kAhead) {
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) unpack_chunk<Tile, kFormat>(part, first + kStep * i);
  }
}

// Formats of the codes that a kernel unpacks. The last one serves every format that is not named before it.
template <PcFormat... kFormats>
struct FormatList {};

// kNarrow: formats whose numbers are within the range of halves. kWide: those with UE8M0 scales.
template <int kBits, bool kNarrow, bool kWide>
struct FormatsOf;
template <>
struct FormatsOf<8, true, false> {
  using Type = FormatList<PC_I8_TOKEN, PC_E5M2, PC_E4M3>;
};
template <>
struct FormatsOf<4, true, false> {
  using Type = FormatList<PC_NVFP4, PC_I4_TOKEN>;
};
template <>
struct FormatsOf<8, false, true> {
  using Type = FormatList<PC_MXFP8>;
};
template <>
struct FormatsOf<4, false, true> {
  using Type = FormatList<PC_FP4_BLOCK16>;
};
template <>
struct FormatsOf<8, true, true> {
  using Type = FormatList<PC_MXFP8, PC_I8_TOKEN, PC_E5M2, PC_E4M3>;
};
template <>
struct FormatsOf<4, true, true> {
  using Type = FormatList<PC_FP4_BLOCK16, PC_NVFP4, PC_I4_TOKEN>;
};

// unpack_rows for the format of the part, which is one of the list.
template <typename Tile, int kRows, int kStep, PcFormat kFormat, PcFormat... kOthers>
PC_DEVICE void unpack_part(const StoredPart& part, int first, FormatList<kFormat, kOthers...>) {
  if constexpr (sizeof...(kOthers) != 0) {
    if (part.format != kFormat) return unpack_part<Tile, kRows, kStep>(part, first, FormatList<kOthers...>());
  }
  unpack_rows<Tile, kRows, kStep, kFormat>(part, first);
}

}  // namespace pagecore
