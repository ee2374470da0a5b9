// Scores for sparse selection: blocks by the bounds of their keys, or tokens by their labels.
//
//   query rows of a key head    [rows, dim] in shared memory, float32; 16 at a time, or one label
//   entry                       a block with its two bounds, or a token with its label: one row of the summaries
//   lanes of an entry           1 to 32, each with chunks of 8 dims: lane l has chunks l, l + lanes, ...
//
//        16 lanes, dim 128                16 lanes
//      | entry 0: 8 dims a lane  |  entry 1: 8 dims a lane  |      a warp, two entries of each group of lanes at a time
//
// A block of threads scores PC_SCORE_ENTRIES entries of one query token and key head. A chunk of a query row is loaded
// once for two entries. In flight: the chunks of two entries, 64 bytes of a lane for 16-bit bounds. Summaries are read
// once for each query token, and once more for each further 16 query heads of a key head. Scores are written once.
#include "cuda_src/device/units.cuh"
#include "cuda_src/sparse/score_queries.cuh"

namespace pagecore {

constexpr int kChunk = 8;     // dims
constexpr int kTogether = 2;  // entries of a group of lanes

// Loads elements d .. d + 7 of a row; those past the row are 0.
template <typename T>
PC_DEVICE void load_chunk(const Global<T>& row, int d, int dim, bool in_vectors, float (&x)[kChunk]) {
  if (in_vectors) {
    const Unit<T, kChunk> unit = load_unit<T, kChunk, false>(row, d);
    PC_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] = element(unit, i);
    return;
  }
  PC_UNROLL
  for (int i = 0; i < kChunk; ++i) x[i] = d + i < dim ? pc_to_float(row.load(d + i)) : 0.0f;
}

// An entry's rows of the summaries.
template <typename T>
struct ScoredEntry {
  int index;
  bool visible;
  Global<T> low, high;
};

template <typename T, bool kBounds>
PC_DEVICE ScoredEntry<T> find_entry(const PcScoreParams& p, const ScoredQuery& query, int index) {
  ScoredEntry<T> entry = {index, index < query.visible, Global<T>(p.low.data), Global<T>(p.high.data)};
  const int at = entry.visible ? kBounds ? index : index / p.block_size : 0;
  pc_int64 block = 0;
  if (entry.visible) {
    const pc_int64 i = query.table_row + at;
    block = p.table.wide != 0 ? Global<pc_int64>(p.table.data).load(i) : Global<int>(p.table.data).load(i);
    if (block < 0 || block >= p.num_blocks) block = 0;
  }
  const pc_int64 offset = kBounds || !entry.visible ? 0 : index - at * p.block_size;
  entry.high =
      entry.high + (block * p.high.block_stride + offset * p.high.token_stride + query.head * p.high.head_stride);
  if (kBounds) entry.low = entry.low + (block * p.low.block_stride + query.head * p.low.head_stride);
  return entry;
}

// Adds the products of one chunk to the sums of each row. A bound is multiplied only where the query is not 0, because
// bounds may be infinite.
template <bool kBounds>
PC_DEVICE void add_products(const Shared<float>& rows, int count, int stride, int d,
                            const float (&low)[kTogether][kChunk], const float (&high)[kTogether][kChunk],
                            float (&sums)[PC_SCORE_ROWS][kTogether]) {
  PC_UNROLL
  for (int r = 0; r < PC_SCORE_ROWS; ++r) {
    if (r >= count) break;
    PC_UNROLL
    for (int half = 0; half < kChunk; half += 4) {
      const pc_vector four = rows.load_vector(r * stride + d + half);
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float q = pc_bits_to_float(four.word[i]);
        PC_UNROLL
        for (int k = 0; k < kTogether; ++k) {
          const float x = kBounds && q < 0.0f ? low[k][half + i] : high[k][half + i];
          if (!kBounds || q != 0.0f) sums[r][k] = pc_fma(q, x, sums[r][k]);
        }
      }
    }
  }
}

// Returns the largest of an entry's sums over the lanes of its group.
PC_DEVICE float best_of(const float (&sums)[PC_SCORE_ROWS][kTogether], int which, int count, int lanes) {
  float best = -pc_infinity();
  PC_UNROLL
  for (int r = 0; r < PC_SCORE_ROWS; ++r) {
    if (r >= count) break;
    float sum = sums[r][which];
    for (int mask = 1; mask < lanes; mask *= 2) sum += pc_shuffle_xor(sum, mask);
    best = sum > best ? sum : best;
  }
  return best;
}

// Scores the entries begin .. end - 1 with `count` query rows. `joins`: the score is the larger of this one and the one
// that is stored.
template <typename T, bool kBounds>
PC_DEVICE void score_entries(const PcScoreParams& p, const ScoredQuery& query, const Shared<float>& rows, int count,
                             int stride, int begin, int end, bool joins) {
  const int lanes = 1 << p.lanes_shift, groups = pc_num_threads() >> p.lanes_shift;
  const int group = pc_thread() >> p.lanes_shift, lane = pc_lane() & (lanes - 1);
  const pc_int64 first = (static_cast<pc_int64>(query.token) * p.num_kv_heads + query.head) * p.width;
  const Global<float> scores = Global<float>(p.scores) + first;
  for (int at = begin; at < end; at += groups * kTogether) {
    ScoredEntry<T> entries[kTogether];
    PC_UNROLL
    for (int k = 0; k < kTogether; ++k) entries[k] = find_entry<T, kBounds>(p, query, at + k * groups + group);
    float sums[PC_SCORE_ROWS][kTogether];
    PC_UNROLL
    for (int r = 0; r < PC_SCORE_ROWS; ++r) {
      PC_UNROLL
      for (int k = 0; k < kTogether; ++k) sums[r][k] = 0.0f;
    }
    for (int d = lane * kChunk; d < p.dim; d += lanes * kChunk) {
      float low[kTogether][kChunk] = {}, high[kTogether][kChunk] = {};
      PC_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        if (entries[k].visible) load_chunk(entries[k].high, d, p.dim, p.in_vectors != 0, high[k]);
        if (kBounds && entries[k].visible) load_chunk(entries[k].low, d, p.dim, p.in_vectors != 0, low[k]);
      }
      add_products<kBounds>(rows, count, stride, d, low, high, sums);
    }
    PC_UNROLL
    for (int k = 0; k < kTogether; ++k) {
      float score = kBounds ? best_of(sums, k, count, lanes) : sums[0][k];
      if (!kBounds) {
        for (int mask = 1; mask < lanes; mask *= 2) score += pc_shuffle_xor(score, mask);
      }
      if (lane != 0 || entries[k].index >= end) continue;
      if (!entries[k].visible) score = -pc_infinity();
      if (joins) score = pc_max(score, scores.load(entries[k].index));
      scores.store(entries[k].index, score);
    }
  }
}

// T: type of the summaries. Grid: query tokens times key heads; stretches of entries, in steps of the axis.
template <typename T, bool kBounds>
PC_KERNEL(PC_SCORE_THREADS, kBounds ? 4 : 8)
void score_keys(const PcScoreParams p) {
  const Shared<float> rows = pc_shared_buffer().as<float>();
  const ScoredQuery query = load_scored_query(p, kBounds ? p.block_size : 1, !kBounds);
  const int stride = (p.dim + kChunk - 1) / kChunk * kChunk, total = kBounds && p.mean == 0 ? p.group : 1;
  for (int row = 0; row < total; row += PC_SCORE_ROWS) {
    const int count = min_of(total - row, PC_SCORE_ROWS);
    if (row > 0) pc_sync_block();  // fault: score_barrier_before_rows
    if (kBounds) {
      load_rows(p, query, row, count, stride, rows);
    } else {
      load_label(p, query, stride, rows);
    }
    pc_sync_block();  // fault: score_barrier_after_rows
    for (pc_int64 begin = static_cast<pc_int64>(pc_block_y()) * PC_SCORE_ENTRIES; begin < p.width;
         begin += static_cast<pc_int64>(pc_num_blocks_y()) * PC_SCORE_ENTRIES) {
      const int end = clamp(begin + PC_SCORE_ENTRIES, 0, p.width);
      score_entries<T, kBounds>(p, query, rows, count, stride, static_cast<int>(begin), end, row > 0);
    }
  }
}

}  // namespace pagecore
