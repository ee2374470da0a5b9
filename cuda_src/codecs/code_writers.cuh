// Scales and codes of a row, for every format. A row provides
//
//   steps(), first(step), lanes, factor       as CodeTarget (code_rows.cuh)
//   load(step, x)                             its numbers first(step) .. + 7; those past the row are 0
//   store, store_packed, store_row_scale, store_group_scale
//
// All lanes of a warp take part, because groups of lanes exchange their largest numbers by shuffles.
#pragma once

#include "cuda_src/codecs/code_rows.cuh"

namespace pagecore {

// Stores the codes of a row: `code_of` of each element.
template <bool kPacked, typename Row, typename CodeOf>
PC_DEVICE void store_codes(const Row& row, const CodeOf& code_of) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = code_of(x[i]);
    if constexpr (kPacked) {
      row.store_packed(step, code);
    } else {
      row.store(step, code);
    }
  }
}

// ---- formats with a given factor

template <bool kWide, typename Row>
PC_DEVICE void write_with_factor(const Row& row) {
  store_codes<false>(row, [&](float x) { return kWide ? e5m2_of(x / row.factor) : e4m3_of(x / row.factor); });
}

// ---- formats with a scale for the row

template <PcFormat kFormat, typename Row>
PC_DEVICE void write_with_row_scale(const Row& row) {
  constexpr bool kIsFloat = kFormat == PC_E4M3_TOKEN, kHasZero = kFormat == PC_I4_TOKEN;
  constexpr float kMost = kIsFloat ? 448.0f : kHasZero ? 15.0f : 127.0f;
  const NumberRange range = range_of_row(row);
  const float size = kHasZero ? min_float(range.high - range.low, kLargestFloat) : range.largest();
  const float scale = pc_max(size / kMost, 1e-6f), inverse = 1.0f / scale;
  const int zero = kHasZero ? integer_of(-range.low * inverse, 0, 15) : 0;
  const bool reads_nan = !kIsFloat && range.has_nan != 0;
  const pc_uint32 bits = pc_float_to_bits(scale);
  row.store_row_scale(reads_nan ? 0x7fc00000u : kHasZero ? (bits & ~15u) | static_cast<pc_uint32>(zero) : bits);
  store_codes<kHasZero>(row, [&](float x) {
    if (kIsFloat) return e4m3_of(x * inverse);
    if (reads_nan) return 0;
    return kHasZero ? integer_of(x * inverse + static_cast<float>(zero), 0, 15) : integer_of(x * inverse, -128, 127);
  });
}

// ---- formats with a scale for each group

template <typename Row>
PC_DEVICE void write_fp4_block16(const Row& row) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(2);
    const int exponent = ceil_log2(pc_max(range.largest() / 6.0f, 1e-10f));
    const float inverse = ue8m0(127 - exponent);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = range.has_nan != 0 ? 0 : e2m1_up_of(x[i], inverse);
    row.store_group_scale(step, 16, range.has_nan != 0 ? 255 : exponent + 127);
    row.store_packed(step, code);
  }
}

template <typename Row>
PC_DEVICE void write_mxfp8(const Row& row) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(4);
    const int exponent = clamp(ceil_log2(pc_max(range.largest(), 1e-30f) / 448.0f), -127, 127);
    const float inverse = ue8m0(127 - exponent);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = e4m3_of(x[i] * inverse);
    row.store_group_scale(step, 32, exponent + 127);
    row.store(step, code);
  }
}

// Codes of 8 numbers of a group, and the scale of the group, for a largest code of `most`.
struct Nvfp4Codes {
  int code[8];
  int scale;
};

PC_DEVICE Nvfp4Codes nvfp4_codes(const float (&x)[8], const NumberRange& range, float most, float factor) {
  Nvfp4Codes made;
  made.scale = range.has_nan != 0 ? 0x7f : e4m3_of(range.largest() / (most * factor));
  const float divisor = float_of_e4m3(made.scale) * factor;
  PC_UNROLL
  for (int i = 0; i < 8; ++i) made.code[i] = divisor == 0.0f || range.has_nan != 0 ? 0 : e2m1_of(x[i] / divisor);
  return made;
}

// The sum of squared errors of a group, whose halves are in two adjacent lanes.
PC_DEVICE float nvfp4_error(const float (&x)[8], const Nvfp4Codes& made, float factor) {
  float sum[8];
  PC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const pc_uint32 pair = halves_of_e2m1(static_cast<pc_uint32>(made.code[i] | made.code[i + 1] << 4));
    const float a = x[i] - low_half(pair) * float_of_e4m3(made.scale) * factor;
    const float b = x[i + 1] - high_half(pair) * float_of_e4m3(made.scale) * factor;
    sum[i] = a * a;
    sum[i + 1] = b * b;
  }
  PC_UNROLL
  for (int i = 0; i < 8; ++i) sum[i] += pc_shuffle_xor(sum[i], 1);
  PC_UNROLL
  for (int half = 4; half > 0; half /= 2) {
    PC_UNROLL
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

template <typename Row>
PC_DEVICE void write_nvfp4(const Row& row, bool is_4over6) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(2);
    Nvfp4Codes made = nvfp4_codes(x, range, 6.0f, row.factor);
    if (is_4over6) {
      const Nvfp4Codes other = nvfp4_codes(x, range, 4.0f, row.factor);
      const float error = nvfp4_error(x, made, row.factor), other_error = nvfp4_error(x, other, row.factor);
      if (other_error < error) made = other;
    }
    row.store_group_scale(step, 16, made.scale);
    row.store_packed(step, made.code);
  }
}

// Writes the codes and scales of a row in a format, which is not PC_PLAIN.
template <typename Row>
PC_DEVICE void write_row(const Row& row, PcFormat format, bool is_4over6) {
  switch (format) {
    case PC_E4M3: return write_with_factor<false>(row);
    case PC_E5M2: return write_with_factor<true>(row);
    case PC_E4M3_TOKEN: return write_with_row_scale<PC_E4M3_TOKEN>(row);
    case PC_I8_TOKEN: return write_with_row_scale<PC_I8_TOKEN>(row);
    case PC_I4_TOKEN: return write_with_row_scale<PC_I4_TOKEN>(row);
    case PC_FP4_BLOCK16: return write_fp4_block16(row);
    case PC_NVFP4: return write_nvfp4(row, is_4over6);
    case PC_MXFP8: return write_mxfp8(row);
    default: return;
  }
}

}  // namespace pagecore
