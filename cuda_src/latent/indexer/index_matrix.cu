// Scores of the sparse indexer by matrix instructions: up to 64 heads of 128 dims over e4m3 keys.
//
//   queries   kTiles * 16 heads, the left operand of mma.m16n8k16, as halves in the registers of every warp
//   keys      8 at a time, the right operand. A warp reads them from device memory, 1024 bytes with two vectors a lane,
//             and converts the codes in registers. No shared memory is used.
//
// The order of the dims in a product is free. Lane (g, q), g = lane / 4, q = lane % 4, has the dims 32q .. 32q + 31 of
// key g, and of heads g and g + 8 of each tile; word s of a key is its part of step s:
//
//   dims of step s    32q + 4s, + 1  (the operand's 2q, 2q + 1)      32q + 4s + 2, + 3  (the operand's 2q + 8, 2q + 9)
//
// A query of bfloat16 is multiplied by a power of two for each head, so that halves hold it, and its weight is divided
// by it. A lane adds up the heads of its two columns; then the eight lanes of a column add up theirs.
//
// Each warp of a block has every fourth tile of 8 keys of the block's range. In flight: one tile is multiplied while
// the next one is loaded. Every key is read once for all heads of a query token, and its block once for each tile.
#include "cuda_src/latent/indexer/rows.cuh"

namespace pagecore {

constexpr int kSteps = PC_INDEX_DIM / 16, kTileKeys = 8;

// The tile of a lane: 32 codes of one key, and the scale of the key.
struct IndexTile {
  pc_vector codes[2];
  float scale;
};

// Past the limit a lane has the last key, whose score is not stored: lanes do not diverge before a collective.
PC_DEVICE IndexTile load_tile(const PcIndexScoreParams& params, const IndexRow& line, int position, int limit) {
  IndexTile tile;
  const KeyPosition at = line.key(params, min_of(position + pc_lane() / 4, limit - 1));
  const Global<pc_uint8> codes = at.key + 32 * (pc_lane() % 4);
  tile.codes[0] = codes.load_vector_once(0);
  tile.codes[1] = codes.load_vector_once(16);
  tile.scale = at.scale;
  return tile;
}

// The factor that takes the largest finite magnitude of a row to 2^14 .. 2^15, and its inverse.
struct RowFactor {
  float factor;
  float inverse;
};

PC_DEVICE RowFactor factor_of(float largest) {
  const int exponent = static_cast<int>(pc_float_to_bits(largest) >> 23);
  const int shift = clamp(14 + 127 - exponent, -100, 100);
  return {ue8m0(127 + shift), ue8m0(127 - shift)};
}

// Loads the dims 32q .. 32q + 31 of a head to the operands of 8 steps, as rows `high` = 0 or 1 of a tile; returns the
// head's weight, divided by the factor of the row.
template <typename T>
PC_DEVICE float load_head(const PcIndexScoreParams& params, int token, int head, int high,
                          pc_uint32 (&operands)[kSteps][4]) {
  float x[32], largest = 0.0f;
  const bool exists = head < params.num_heads;
  const Global<T> row = Global<T>(params.query.data) +
                        (token * params.query.token_stride + (exists ? head : 0) * params.query.head_stride);
  PC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Unit<T, 8> unit = load_unit<T, 8, false>(row, 32 * (pc_lane() % 4) + 8 * i);
    PC_UNROLL
    for (int j = 0; j < 8; ++j) x[8 * i + j] = exists ? element(unit, j) : 0.0f;
  }
  PC_UNROLL
  for (int i = 0; i < 32; ++i) {
    const float size = magnitude_of(x[i]);
    if (size <= kLargestNumber) largest = pc_max(largest, size);
  }
  largest = pc_max(largest, pc_shuffle_xor(largest, 1));
  largest = pc_max(largest, pc_shuffle_xor(largest, 2));
  const RowFactor by = IsSame<T, pc_half>::kValue ? RowFactor{1.0f, 1.0f} : factor_of(largest);
  PC_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    operands[s][high] = pc_pack<pc_half>(x[4 * s] * by.factor, x[4 * s + 1] * by.factor);
    operands[s][2 + high] = pc_pack<pc_half>(x[4 * s + 2] * by.factor, x[4 * s + 3] * by.factor);
  }
  const float weight = weight_of(params, token, exists ? head : 0);
  return exists ? weight * by.inverse : 0.0f;  // fault: index_factor_of_a_head
}

// NaN is not below 0, and so propagates.
PC_DEVICE float positive_part(float x) {
  return x < 0.0f ? 0.0f : x;  // fault: index_positive_part
}

template <typename T, int kTiles>
PC_DEVICE void score_row(const PcIndexScoreParams& params, int token, const IndexRow& line) {
  const int limit = min_of(line.end, line.visible), step = kTileKeys * (PC_MOVE_THREADS / 32);
  int position = line.begin + kTileKeys * pc_warp();
  if (position >= limit) return;
  pc_uint32 queries[kTiles][kSteps][4];
  float weights[kTiles][2];
  PC_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    PC_UNROLL
    for (int high = 0; high < 2; ++high) {
      weights[tile][high] = load_head<T>(params, token, 16 * tile + 8 * high + pc_lane() / 4, high, queries[tile]);
    }
  }
  IndexTile next = load_tile(params, line, position, limit);
  PC_NO_UNROLL
  for (; position < limit; position += step) {
    const IndexTile keys = next;
    next = load_tile(params, line, position + step, limit);
    float sums[2] = {};
    pc_uint32 halves[kSteps][2];
    PC_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      const pc_uint32 word = keys.codes[s / 4].word[s % 4];
      halves[s][0] = halves_of_e4m3(word & 0xffffu);
      halves[s][1] = halves_of_e4m3(word >> 16);
    }
    PC_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float products[4] = {};
      PC_UNROLL
      for (int s = 0; s < kSteps; ++s) pc_multiply<pc_half>(products, queries[tile][s], halves[s][0], halves[s][1]);
      PC_UNROLL
      for (int column = 0; column < 2; ++column) {
        sums[column] = pc_fma(positive_part(products[column]), weights[tile][0], sums[column]);
        sums[column] = pc_fma(positive_part(products[2 + column]), weights[tile][1], sums[column]);
      }
    }
    PC_UNROLL
    for (int column = 0; column < 2; ++column) {
      PC_UNROLL
      for (int mask = 4; mask < 32; mask *= 2) {
        sums[column] += pc_shuffle_xor(sums[column], mask);  // fault: index_heads_of_a_column
      }
      const int key = 2 * (pc_lane() % 4) + column;
      const float scale = pc_shuffle(keys.scale, 4 * key);  // fault: index_scale_of_a_key
      if (pc_lane() < 4 && position + key < limit) line.out.store(position + key, sums[column] * scale);
    }
  }
}

// Grid: ranges of keys; query tokens, in steps of the axis.
template <typename T, int kTiles>
PC_KERNEL(128, 2)
void index_scores_matrix(const PcIndexScoreParams params) {
  for (int token = pc_block_y(); token < params.num_tokens; token += pc_num_blocks_y()) {
    const IndexRow line(params, token);
    score_row<T, kTiles>(params, token, line);
    for (int i = max_of(line.begin, line.visible) + pc_thread(); i < line.end; i += pc_num_threads()) {
      line.out.store(i, -pc_infinity());
    }
  }
}

}  // namespace pagecore
