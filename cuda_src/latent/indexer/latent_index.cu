// The indexer of sparse attention: writes of its keys, scores in float32, and the slots of positions.
//
//   write_index_keys   1 to 32 lanes of a warp for the key of a token, in chunks of 8 numbers. A key is read twice:
//                      once for its scale, and the second time from the cache of the multiprocessor.
//   index_scores       one thread for each key of a query token; 8 heads at once have their sums in registers, so that
//                      a key is read once for 8 heads, and again from the cache of the multiprocessor. All threads
//                      read the same elements of the query. It serves what index_scores_matrix (index_matrix.cu) does
//                      not: queries of float32, plain keys, other dims, and any number of heads.
//   index_slots        one thread for each position.
#include "cuda_src/latent/indexer/rows.cuh"

namespace pagecore {

// ---- keys

// A lane beyond the tokens has no row, but takes part in the exchange of the largest numbers.
PC_KERNEL(128, 8)
void write_index_keys(const PcIndexWriteParams params) {
  const pc_int64 thread = static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread();
  const pc_int64 token = thread >> params.lanes_shift;
  const int lanes = 1 << params.lanes_shift, lane = pc_lane() & (lanes - 1), dim = params.key.dim;
  const bool exists = token < params.slots.slots.size;
  float largest = 0.0f;
  for (int at = 8 * lane; exists && at < dim; at += 8 * lanes) {
    float x[8];
    load_chunk(params.key, token, at, x);
    largest = pc_max(largest, largest_of(x));
  }
  largest = largest_of_lanes(largest, lanes);
  if (!exists) return;  // fault: index_keys_past_the_end
  const SlotOffset place = slot_of_token(params.slots, token);
  if (!place.is_written) return;
  const float scale = ue8m0(ceil_log2(pc_max(largest, 1e-4f) / 448.0f) + 127);
  const Global<pc_uint8> row =
      Global<pc_uint8>(params.keys) + (place.block * params.block_stride + place.offset * params.token_stride);
  for (int at = 8 * lane; at < dim; at += 8 * lanes) {
    float x[8];
    int code[8];
    load_chunk(params.key, token, at, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = e4m3_of(x[i] / scale);
    store_e4m3(row, at, dim, params.in_vectors != 0, code);
  }
  if (lane != 0) return;
  const pc_int64 at = place.block * params.scale_block_stride + place.offset * params.scale_token_stride;
  (Global<pc_uint8>(params.scales) + at).as<float>().store(0, scale);
}

// ---- scores

constexpr int kHeadsAtOnce = 8;

// Loads 4 elements from `at` on; those past `dim` are 0.
template <typename T>
PC_DEVICE void load_four(const Global<T>& row, int at, int dim, bool in_vectors, float (&x)[4]) {
  if (in_vectors) {
    const Unit<T, 4> unit = load_unit<T, 4, false>(row, at);
    PC_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = element(unit, i);
    return;
  }
  PC_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = at + i < dim ? pc_to_float(row.load(at + i)) : 0.0f;
}

PC_DEVICE void load_four_codes(const Global<pc_uint8>& row, int at, int dim, bool in_vectors, float (&x)[4]) {
  pc_uint32 codes = 0;
  if (in_vectors) {
    codes = (row + at).as<pc_uint32>().load(0);
  } else {
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (at + i < dim) codes |= static_cast<pc_uint32>(row.load(at + i)) << 8 * i;
    }
  }
  const pc_uint32 low = halves_of_e4m3(codes & 0xffffu), high = halves_of_e4m3(codes >> 16);
  x[0] = low_half(low), x[1] = high_half(low);
  x[2] = low_half(high), x[3] = high_half(high);
}

PC_DEVICE void load_four_of_key(const PcIndexScoreParams& params, const Global<pc_uint8>& key, int at, float (&x)[4]) {
  const bool in_vectors = params.in_vectors != 0;
  if (params.key_type == PC_INDEX_E4M3) return load_four_codes(key, at, params.dim, in_vectors, x);
  if (params.key_type == PC_FLOAT32) return load_four(key.as<float>(), at, params.dim, in_vectors, x);
  if (params.key_type == PC_FLOAT16) return load_four(key.as<pc_half>(), at, params.dim, in_vectors, x);
  load_four(key.as<pc_bfloat16>(), at, params.dim, in_vectors, x);
}

// The sum over all heads of weight * relu(query . key). NaN is not below 0, and so propagates.
template <typename T>
PC_DEVICE float score_of(const PcIndexScoreParams& params, int token, const Global<pc_uint8>& key) {
  const Global<T> query = Global<T>(params.query.data) + token * params.query.token_stride;
  float total = 0.0f;
  for (int head = 0; head < params.num_heads; head += kHeadsAtOnce) {
    float sum[kHeadsAtOnce] = {};
    for (int at = 0; at < params.dim; at += 4) {
      float k[4];
      load_four_of_key(params, key, at, k);
      PC_UNROLL
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        if (head + h >= params.num_heads) break;
        float q[4];
        load_four(query + (head + h) * params.query.head_stride, at, params.dim, params.in_vectors != 0, q);
        PC_UNROLL
        for (int i = 0; i < 4; ++i) sum[h] = pc_fma(q[i], k[i], sum[h]);
      }
    }
    PC_UNROLL
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (head + h >= params.num_heads) break;
      total = pc_fma(sum[h] < 0.0f ? 0.0f : sum[h], weight_of(params, token, head + h), total);
    }
  }
  return total;
}

// Grid: ranges of keys; query tokens, in steps of the axis.
template <typename T>
PC_KERNEL(128, 4)
void index_scores(const PcIndexScoreParams params) {
  for (int token = pc_block_y(); token < params.num_tokens; token += pc_num_blocks_y()) {
    const IndexRow line(params, token);
    for (int position = line.begin + pc_thread(); position < line.end; position += pc_num_threads()) {
      float score = -pc_infinity();
      if (position < line.visible) {
        const KeyPosition at = line.key(params, position);
        score = score_of<T>(params, token, at.key) * at.scale;
      }
      line.out.store(position, score);
    }
  }
}

// ---- slots

PC_KERNEL(128, 8)
void index_slots(const PcIndexSlotParams params) {
  constexpr pc_int64 kSlotMax = 0x7fffffff;
  const PcSequenceBatch& batch = params.batch;
  const pc_int64 size = batch.block_size.divisor;
  const pc_int64 step = static_cast<pc_int64>(pc_num_blocks_x()) * pc_num_threads();
  for (pc_int64 i = static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread(); i < params.num_positions;
       i += step) {
    const int token = divide(static_cast<int>(i), params.width);
    const pc_int64 at = token * params.position_stride + (i - static_cast<pc_int64>(token) * params.width.divisor);
    const pc_int64 position =
        params.wide ? Global<pc_int64>(params.positions).load(at) : Global<int>(params.positions).load(at);
    pc_int64 slot = -1;
    if (position >= 0 && position < batch.table.width * size && position <= kSlotMax) {
      const QueryOfSequence query = sequence_of(batch, token);
      const int entry = divide(static_cast<int>(position), batch.block_size);
      const pc_int64 block = query.row < 0 ? -1 : block_entry(batch, query.row, entry);
      if (block >= 0 && block <= kSlotMax / size - 1) slot = block * size + (position - entry * size);
    }
    Global<int>(params.out).store(i, static_cast<int>(slot));
  }
}

}  // namespace pagecore
