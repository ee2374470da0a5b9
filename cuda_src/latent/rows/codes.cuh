// Packed rows of latents: the codes of 576 numbers, and the numbers of a row. One warp processes a row, in chunks of 8
// numbers: lane l has chunks l and l + 32 of the latent, and lanes 0 to 7 have those of the rope.
#pragma once

#include "cuda_src/latent/rows/numbers.cuh"

namespace pagecore {

// Numbers and bytes of packed rows.
constexpr int kPackedLatent = 512, kPackedRope = 64;
constexpr int kFp8ScalesAt = 512, kFp8RopeAt = 528, kNvfp4RopeAt = 256, kNvfp4ScalesAt = 320;

PC_DEVICE int nvfp4_scale_at(int group) { return kNvfp4ScalesAt + 8 * (group & 3) + (group >> 2); }

// ---- writes; a source provides load_latent(chunk, x) and load_rope(chunk, x)

PC_DEVICE void codes_of(const float (&x)[8], float factor, int (&code)[8]) {
  PC_UNROLL
  for (int i = 0; i < 8; ++i) code[i] = e4m3_of(x[i] / factor);
}

template <typename Source>
PC_DEVICE void write_fp8_row(const Source& source, const Global<pc_uint8>& row) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    float x[8];
    int code[8];
    source.load_latent(chunk, x);
    const float largest = largest_of_lanes(largest_of(x), 16);  // fault: latent_lanes_of_a_scale
    const float scale = ue8m0(ceil_log2(pc_max(largest / 448.0f, 1e-4f)) + 127);
    codes_of(x, scale, code);
    store_e4m3(row, 8 * chunk, kPackedLatent, true, code);
    if (chunk % 16 == 0) (row + kFp8ScalesAt).as<float>().store(chunk / 16, scale);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  float x[8];
  source.load_rope(pc_lane(), x);
  store_unit((row + kFp8RopeAt).as<pc_bfloat16>(), 8 * pc_lane(), unit_of<pc_bfloat16>(x));
}

// A NaN makes the scale of its group NaN.
template <typename Source>
PC_DEVICE void write_nvfp4_row(const Source& source, const Global<pc_uint8>& row) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    float x[8];
    source.load_latent(chunk, x);
    int has_nan = 0;
    PC_UNROLL
    for (int i = 0; i < 8; ++i) has_nan |= x[i] != x[i] ? 1 : 0;
    has_nan |= pc_shuffle_xor(has_nan, 1);  // fault: latent_nan_of_a_group
    const float largest = largest_of_lanes(largest_of(x), 2);
    const int scale = has_nan != 0 ? 0x7f : e4m3_of(pc_max(largest / 6.0f, 0.001953125f));
    const float factor = float_of_e4m3(scale);
    pc_uint32 codes = 0;
    PC_UNROLL
    for (int i = 0; i < 8; ++i) codes |= static_cast<pc_uint32>(has_nan != 0 ? 0 : e2m1_of(x[i] / factor)) << 4 * i;
    row.as<pc_uint32>().store(chunk, codes);
    if (chunk % 2 == 0) row.store(nvfp4_scale_at(chunk / 2), static_cast<pc_uint8>(scale));
  }
  if (pc_lane() >= kPackedRope / 8) return;
  float x[8];
  int code[8];
  source.load_rope(pc_lane(), x);
  codes_of(x, 1.0f, code);
  store_e4m3(row + kNvfp4RopeAt, 8 * pc_lane(), kPackedRope, true, code);
}

// ---- reads, 8 numbers of a chunk

// Products of codes and scales are rounded to bfloat16, as the attention kernels read them.
PC_DEVICE void load_fp8_latent(const Global<pc_uint8>& row, int chunk, float (&x)[8]) {
  floats_of_e4m3(load_e4m3(row, 8 * chunk, kPackedLatent, true), x);
  const float scale = (row + kFp8ScalesAt).as<float>().load(chunk / 16);
  PC_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = pc_to_float(pc_from_float<pc_bfloat16>(x[i] * scale));  // fault: latent_rounding_of_products
  }
}

PC_DEVICE void load_fp8_rope(const Global<pc_uint8>& row, int chunk, float (&x)[8]) {
  load_typed_chunk((row + kFp8RopeAt).as<pc_bfloat16>(), 8 * chunk, kPackedRope, true, x);
}

PC_DEVICE void load_nvfp4_latent(const Global<pc_uint8>& row, int chunk, float (&x)[8]) {
  const pc_uint32 codes = row.as<pc_uint32>().load(chunk);
  const float scale = float_of_e4m3(row.load(nvfp4_scale_at(chunk / 2)));
  PC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const pc_uint32 pair = halves_of_e2m1(codes >> 8 * i);
    x[2 * i] = low_half(pair) * scale;
    x[2 * i + 1] = high_half(pair) * scale;
  }
}

PC_DEVICE void load_nvfp4_rope(const Global<pc_uint8>& row, int chunk, float (&x)[8]) {
  floats_of_e4m3(load_e4m3(row + kNvfp4RopeAt, 8 * chunk, kPackedRope, true), x);
}

}  // namespace pagecore
