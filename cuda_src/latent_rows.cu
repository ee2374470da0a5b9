// Rows of latent caches: slot-mapped writes with quantisation, and copies of sequences out of a cache.
//
//   row      the latent and the rope numbers of a token; one warp processes it, so that a block has four tokens
//   chunk    8 numbers: 16 bytes of 16-bit elements or 32 of float32, and 8 or 4 bytes of codes
//
//   fp8_ds_mla    lane  0 .. 15 | 16 .. 31     two steps; 16 lanes share a scale of 128 numbers
//   nvfp4_ds_mla  lane  0  1 | 2  3 | ...      two steps; 2 lanes share a scale of 16 numbers
//   rope          lane  0 .. 7                 a third step
//
// Every new number is read once and every byte of a row is written once, with 8 or 16 bytes a lane. A gather reads the
// bytes of a row once. In flight: one chunk a lane in each of 16 or more warps of a multiprocessor. The slot and the
// block of a token are read by all lanes of its warp, which therefore leave together.
#include "block_sums.cuh"
#include "latent_numbers.cuh"

namespace pagecore {

// Numbers and bytes of packed rows.
constexpr int kPackedLatent = 512, kPackedRope = 64;
constexpr int kFp8ScalesAt = 512, kFp8RopeAt = 528, kNvfp4RopeAt = 256, kNvfp4ScalesAt = 320;

PC_DEVICE int nvfp4_scale_at(int group) { return kNvfp4ScalesAt + 8 * (group & 3) + (group >> 2); }

// ---- writes

PC_DEVICE void codes_of(const float (&x)[8], float factor, int (&code)[8]) {
  PC_UNROLL
  for (int i = 0; i < 8; ++i) code[i] = e4m3_of(x[i] / factor);
}

PC_DEVICE void write_e4m3_part(const PcNewRows& rows, pc_int64 token, const Global<pc_uint8>& row, bool in_vectors,
                               float factor) {
  for (int at = 8 * pc_lane(); at < rows.dim; at += 8 * 32) {
    float x[8];
    int code[8];
    load_chunk(rows, token, at, x);
    codes_of(x, factor, code);
    store_e4m3(row, at, rows.dim, in_vectors, code);
  }
}

PC_DEVICE void write_fp8_row(const PcLatentWriteParams& params, pc_int64 token, const Global<pc_uint8>& row) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    float x[8];
    int code[8];
    load_chunk(params.latent, token, 8 * chunk, x);
    const float largest = largest_of_lanes(largest_of(x), 16);  // fault: latent_lanes_of_a_scale
    const float scale = ue8m0(ceil_log2(pc_max(largest / 448.0f, 1e-4f)) + 127);
    codes_of(x, scale, code);
    store_e4m3(row, 8 * chunk, kPackedLatent, true, code);
    if (chunk % 16 == 0) (row + kFp8ScalesAt).as<float>().store(chunk / 16, scale);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  float x[8];
  load_chunk(params.rope, token, 8 * pc_lane(), x);
  store_unit((row + kFp8RopeAt).as<pc_bfloat16>(), 8 * pc_lane(), unit_of<pc_bfloat16>(x));
}

// A NaN makes the scale of its group NaN.
PC_DEVICE void write_nvfp4_row(const PcLatentWriteParams& params, pc_int64 token, const Global<pc_uint8>& row) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    float x[8];
    load_chunk(params.latent, token, 8 * chunk, x);
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
  load_chunk(params.rope, token, 8 * pc_lane(), x);
  codes_of(x, 1.0f, code);
  store_e4m3(row + kNvfp4RopeAt, 8 * pc_lane(), kPackedRope, true, code);
}

PC_KERNEL(128, 8)
void write_latent_rows(const PcLatentWriteParams params) {
  const pc_int64 token = static_cast<pc_int64>(pc_block_x()) * PC_LATENT_ROW_TOKENS + pc_warp();
  if (token >= params.slots.slots.size) return;  // fault: latent_tokens_past_the_end
  const SlotOffset at = slot_of_token(params.slots, token);
  if (!at.is_written) return;
  const PcLatentRows& cache = params.cache;
  const Global<pc_uint8> row =
      Global<pc_uint8>(cache.latent) + (at.block * cache.block_stride + at.offset * cache.token_stride);
  if (cache.format == PC_LATENT_ROW_FP8) return write_fp8_row(params, token, row);
  if (cache.format == PC_LATENT_ROW_NVFP4) return write_nvfp4_row(params, token, row);
  const Global<pc_uint8> rope =
      Global<pc_uint8>(cache.rope) + (at.block * cache.rope_block_stride + at.offset * cache.rope_token_stride);
  write_e4m3_part(params.latent, token, row, cache.latent_in_vectors != 0, params.factor);
  write_e4m3_part(params.rope, token, rope, cache.rope_in_vectors != 0, params.factor);
}

// ---- copies out of a cache

template <typename T>
struct LatentOutput {
  Global<T> row;
  bool in_vectors;

  PC_MEMBER void store(int at, int end, const float (&x)[8]) const {
    if (in_vectors) return store_unit(row, at, unit_of<T>(x));
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (at + i < end) row.store(at + i, pc_from_float<T>(x[i]));
    }
  }
};

// Products of codes and scales are rounded to bfloat16, as the attention kernels read them.
template <typename T>
PC_DEVICE void gather_fp8_row(const Global<pc_uint8>& row, const LatentOutput<T>& out) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    float x[8];
    floats_of_e4m3(load_e4m3(row, 8 * chunk, kPackedLatent, true), x);
    const float scale = (row + kFp8ScalesAt).as<float>().load(chunk / 16);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      x[i] = pc_to_float(pc_from_float<pc_bfloat16>(x[i] * scale));  // fault: latent_rounding_of_products
    }
    out.store(8 * chunk, kPackedLatent, x);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  float x[8];
  load_typed_chunk((row + kFp8RopeAt).as<pc_bfloat16>(), 8 * pc_lane(), kPackedRope, true, x);
  out.store(kPackedLatent + 8 * pc_lane(), kPackedLatent + kPackedRope, x);
}

template <typename T>
PC_DEVICE void gather_nvfp4_row(const Global<pc_uint8>& row, const LatentOutput<T>& out) {
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    const pc_uint32 codes = row.as<pc_uint32>().load(chunk);
    const float scale = float_of_e4m3(row.load(nvfp4_scale_at(chunk / 2)));
    float x[8];
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      const pc_uint32 pair = halves_of_e2m1(codes >> 8 * i);
      x[2 * i] = low_half(pair) * scale;
      x[2 * i + 1] = high_half(pair) * scale;
    }
    out.store(8 * chunk, kPackedLatent, x);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  float x[8];
  floats_of_e4m3(load_e4m3(row + kNvfp4RopeAt, 8 * pc_lane(), kPackedRope, true), x);
  out.store(kPackedLatent + 8 * pc_lane(), kPackedLatent + kPackedRope, x);
}

// Copies `dim` numbers of one part of a row to column `first` of the output.
template <typename T>
PC_DEVICE void gather_part(const PcLatentRows& cache, const Global<pc_uint8>& row, int dim, bool in_vectors,
                           float factor, int first, const LatentOutput<T>& out) {
  for (int at = 8 * pc_lane(); at < dim; at += 8 * 32) {
    float x[8];
    if (cache.format == PC_LATENT_ROW_E4M3) {
      floats_of_e4m3(load_e4m3(row, at, dim, in_vectors), x);
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] *= factor;
    } else {
      load_chunk(row.address(), cache.type, at, dim, in_vectors, x);
    }
    out.store(first + at, first + dim, x);
  }
}

template <typename T>
PC_DEVICE void gather_row(const PcLatentGatherParams& params, pc_int64 block, int offset, const LatentOutput<T>& out) {
  const PcLatentRows& cache = params.cache;
  const Global<pc_uint8> row =
      Global<pc_uint8>(cache.latent) + (block * cache.block_stride + offset * cache.token_stride);
  if (cache.format == PC_LATENT_ROW_FP8) return gather_fp8_row(row, out);
  if (cache.format == PC_LATENT_ROW_NVFP4) return gather_nvfp4_row(row, out);
  gather_part(cache, row, cache.latent_dim, cache.latent_in_vectors != 0, params.factor, 0, out);
  if (cache.rope_dim == 0) return;
  const Global<pc_uint8> rope =
      Global<pc_uint8>(cache.rope) + (block * cache.rope_block_stride + offset * cache.rope_token_stride);
  gather_part(cache, rope, cache.rope_dim, cache.rope_in_vectors != 0, params.factor, cache.latent_dim, out);
}

// Grid: sequences; their blocks, in steps of the axis. The start of a sequence in the output is the sum of the lengths
// before it, which each block of threads computes for itself.
template <typename T>
PC_KERNEL(128, 4)
void gather_latent_rows(const PcLatentGatherParams params) {
  const PcSequenceBatch& batch = params.batch;
  const int sequence = pc_block_x(), block_size = batch.block_size.divisor;
  const int columns = params.cache.latent_dim + params.cache.rope_dim;
  pc_int64 begin = 0;
  for (int i = pc_thread(); i < sequence; i += pc_num_threads()) begin += length_of(batch, i);
  begin = sum_over_block<PC_MOVE_THREADS>(begin);
  const pc_int64 row = batch.rows.data != 0 ? load_index(batch.rows, sequence) : sequence;
  const bool has_row = row >= 0 && row < batch.table.num_rows;
  const pc_int64 room = params.num_tokens - begin, length = length_of(batch, sequence);
  const pc_int64 tokens = length < room ? length : room;
  for (pc_int64 at = pc_block_y(); at * block_size < tokens; at += pc_num_blocks_y()) {
    const pc_int64 block = has_row ? block_in_cache(batch, row, static_cast<int>(at)) : 0;
    const pc_int64 left = tokens - at * block_size;
    const int count = left < block_size ? static_cast<int>(left) : block_size;
    for (int offset = pc_warp(); offset < count; offset += PC_LATENT_ROW_TOKENS) {
      const pc_int64 token = begin + at * block_size + offset;
      const LatentOutput<T> out = {Global<T>(params.out) + token * params.out_stride, params.out_in_vectors != 0};
      if (block != 0) {
        gather_row(params, block, offset, out);
        continue;
      }
      const float zeros[8] = {};
      for (int d = 8 * pc_lane(); d < columns; d += 8 * 32) out.store(d, columns, zeros);
    }
  }
}

}  // namespace pagecore
