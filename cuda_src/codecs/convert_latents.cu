// Conversion of rows of latents between packed formats, e4m3 and plain numbers.
//
// A warp processes the row of a token, and a block of threads four rows. Chunks are 8 numbers: lane l has chunks l and
// l + 32 of the latent, and lanes 0 to 7 have those of the rope. Every row has 512 latent and 64 rope numbers, because
// one side at least is packed. The x axis of the grid has the tokens of a block, the y axis the pairs of blocks. Every
// byte is read once and written once.
#include "cuda_src/codecs/convert_pairs.cuh"
#include "cuda_src/latent/rows/codes.cuh"

namespace pagecore {

// The parts of a row of a cache.
struct LatentRowPlace {
  Global<pc_uint8> latent;
  Global<pc_uint8> rope;
};

PC_DEVICE LatentRowPlace latent_row_at(const PcLatentRows& cache, pc_int64 block, int token) {
  return {Global<pc_uint8>(cache.latent) + (block * cache.block_stride + token * cache.token_stride),
          Global<pc_uint8>(cache.rope) + (block * cache.rope_block_stride + token * cache.rope_token_stride)};
}

// A stored row as the source of a write.
struct StoredLatentRow {
  const PcLatentRows& cache;
  LatentRowPlace at;
  float factor;

  PC_MEMBER void load_part(const Global<pc_uint8>& row, int first, int dim, bool in_vectors, float (&x)[8]) const {
    if (cache.format == PC_LATENT_ROW_PLAIN) return load_chunk(row.address(), cache.type, first, dim, in_vectors, x);
    floats_of_e4m3(load_e4m3(row, first, dim, in_vectors), x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) x[i] *= factor;
  }

  PC_MEMBER void load_latent(int chunk, float (&x)[8]) const {
    if (cache.format == PC_LATENT_ROW_FP8) return load_fp8_latent(at.latent, chunk, x);
    if (cache.format == PC_LATENT_ROW_NVFP4) return load_nvfp4_latent(at.latent, chunk, x);
    load_part(at.latent, 8 * chunk, kPackedLatent, cache.latent_in_vectors != 0, x);
  }

  PC_MEMBER void load_rope(int chunk, float (&x)[8]) const {
    if (cache.format == PC_LATENT_ROW_FP8) return load_fp8_rope(at.latent, chunk, x);
    if (cache.format == PC_LATENT_ROW_NVFP4) return load_nvfp4_rope(at.latent, chunk, x);
    load_part(at.rope, 8 * chunk, kPackedRope, cache.rope_in_vectors != 0, x);
  }
};

template <typename T>
PC_DEVICE void store_plain_chunk(const Global<T>& row, int first, bool in_vectors, const float (&x)[8]) {
  if (in_vectors) return store_unit(row, first, unit_of<T>(x));
  PC_UNROLL
  for (int i = 0; i < 8; ++i) row.store(first + i, pc_from_float<T>(x[i]));
}

// Stores 8 numbers of a part of a row without scales of its own: e4m3 codes, or plain numbers.
PC_DEVICE void store_chunk(const PcLatentRows& cache, const Global<pc_uint8>& row, int chunk, int dim, bool in_vectors,
                           float factor, const float (&x)[8]) {
  if (cache.format == PC_LATENT_ROW_E4M3) {
    int code[8];
    codes_of(x, factor, code);
    return store_e4m3(row, 8 * chunk, dim, in_vectors, code);
  }
  if (cache.type == PC_FLOAT32) return store_plain_chunk(row.as<float>(), 8 * chunk, in_vectors, x);
  if (cache.type == PC_FLOAT16) return store_plain_chunk(row.as<pc_half>(), 8 * chunk, in_vectors, x);
  store_plain_chunk(row.as<pc_bfloat16>(), 8 * chunk, in_vectors, x);
}

PC_DEVICE void write_unpacked_row(const StoredLatentRow& source, const PcLatentRows& cache, const LatentRowPlace& to,
                                  float factor) {
  float x[8];
  PC_UNROLL
  for (int step = 0; step < 2; ++step) {
    const int chunk = 32 * step + pc_lane();
    source.load_latent(chunk, x);
    store_chunk(cache, to.latent, chunk, kPackedLatent, cache.latent_in_vectors != 0, factor, x);
  }
  if (pc_lane() >= kPackedRope / 8) return;
  source.load_rope(pc_lane(), x);
  store_chunk(cache, to.rope, pc_lane(), kPackedRope, cache.rope_in_vectors != 0, factor, x);
}

PC_KERNEL(128, 8)
void convert_latents(const PcLatentConvertParams params) {
  const int token = pc_block_x() * PC_LATENT_ROW_TOKENS + pc_warp();
  if (token >= params.block_size) return;  // fault: convert_latent_tokens_past_the_end
  for_each_pair(params.pairs, [&](pc_int64 source_block, pc_int64 target_block) {
    const PcLatentRows& cache = params.target;
    const StoredLatentRow source = {params.source, latent_row_at(params.source, source_block, token),
                                    params.source_factor};
    const LatentRowPlace to = latent_row_at(cache, target_block, token);
    if (cache.format == PC_LATENT_ROW_FP8) return write_fp8_row(source, to.latent);
    if (cache.format == PC_LATENT_ROW_NVFP4) return write_nvfp4_row(source, to.latent);
    write_unpacked_row(source, cache, to, params.target_factor);
  });
}

}  // namespace pagecore
