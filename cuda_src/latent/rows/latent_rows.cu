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
#include "cuda_src/device/block_sums.cuh"
#include "cuda_src/latent/rows/codes.cuh"

namespace pagecore {

// ---- writes

// The new row of a token.
struct NewLatentRow {
  const PcLatentWriteParams& params;
  pc_int64 token;

  PC_MEMBER void load_latent(int chunk, float (&x)[8]) const { load_chunk(params.latent, token, 8 * chunk, x); }
  PC_MEMBER void load_rope(int chunk, float (&x)[8]) const { load_chunk(params.rope, token, 8 * chunk, x); }
};

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

PC_KERNEL(128, 8)
void write_latent_rows(const PcLatentWriteParams params) {
  const pc_int64 token = static_cast<pc_int64>(pc_block_x()) * PC_LATENT_ROW_TOKENS + pc_warp();
  if (token >= params.slots.slots.size) return;  // fault: latent_tokens_past_the_end
  const SlotOffset at = slot_of_token(params.slots, token);
  if (!at.is_written) return;
  const PcLatentRows& cache = params.cache;
  const Global<pc_uint8> row =
      Global<pc_uint8>(cache.latent) + (at.block * cache.block_stride + at.offset * cache.token_stride);
  if (cache.format == PC_LATENT_ROW_FP8) return write_fp8_row(NewLatentRow{params, token}, row);
  if (cache.format == PC_LATENT_ROW_NVFP4) return write_nvfp4_row(NewLatentRow{params, token}, row);
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

// Copies a packed row, whose chunks `latent` and `rope` load.
template <typename T, typename Latent, typename Rope>
PC_DEVICE void gather_packed_row(const Latent& latent, const Rope& rope, const LatentOutput<T>& out) {
  float x[8];
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    latent(chunk, x);
    out.store(8 * chunk, kPackedLatent, x);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  rope(pc_lane(), x);
  out.store(kPackedLatent + 8 * pc_lane(), kPackedLatent + kPackedRope, x);
}

template <typename T>
PC_DEVICE void gather_fp8_row(const Global<pc_uint8>& row, const LatentOutput<T>& out) {
  gather_packed_row([&](int chunk, float (&x)[8]) { load_fp8_latent(row, chunk, x); },
                    [&](int chunk, float (&x)[8]) { load_fp8_rope(row, chunk, x); }, out);
}

template <typename T>
PC_DEVICE void gather_nvfp4_row(const Global<pc_uint8>& row, const LatentOutput<T>& out) {
  gather_packed_row([&](int chunk, float (&x)[8]) { load_nvfp4_latent(row, chunk, x); },
                    [&](int chunk, float (&x)[8]) { load_nvfp4_rope(row, chunk, x); }, out);
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
    const pc_int64 block = has_row ? block_in_cache(batch, row, static_cast<int>(at), params.lowest, -1) : -1;
    const pc_int64 left = tokens - at * block_size;
    const int count = left < block_size ? static_cast<int>(left) : block_size;
    for (int offset = pc_warp(); offset < count; offset += PC_LATENT_ROW_TOKENS) {
      const pc_int64 token = begin + at * block_size + offset;
      const LatentOutput<T> out = {Global<T>(params.out) + token * params.out_stride, params.out_in_vectors != 0};
      if (block >= 0) {
        gather_row(params, block, offset, out);
        continue;
      }
      const float zeros[8] = {};
      for (int d = 8 * pc_lane(); d < columns; d += 8 * 32) out.store(d, columns, zeros);
    }
  }
}

}  // namespace pagecore
