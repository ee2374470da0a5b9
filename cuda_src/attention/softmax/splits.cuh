// Results of the attention kernels: rows of the output, partial rows of tiles whose keys are split, and the join of
// these parts by the last CTA of a tile.
#pragma once

#include "cuda_src/attention/softmax/scores.cuh"
#include "cuda_src/device/floats.cuh"
#include "cuda_src/device/formats.cuh"

namespace pagecore {

// ---- elements of a type that is known only at run time

// Two numbers as adjacent codes of e4m3; larger numbers become the largest code.
PC_DEVICE pc_uint32 e4m3_pair(float low, float high) {
  return static_cast<pc_uint32>(e4m3_of(low) | e4m3_of(high) << 8);
}

// Stores N adjacent elements, N == 1 or 4; the index of four is a multiple of 4.
template <int N>
PC_DEVICE void store_floats(PcFloat type, pc_address data, pc_int64 i, const float (&x)[N]) {
  if (type == PC_FLOAT8_E4M3) {
    if constexpr (N == 1) {
      Global<pc_uint8>(data).store(i, static_cast<pc_uint8>(e4m3_of(x[0])));
    } else {
      Global<pc_uint32>(data).store(i / 4, e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16);
    }
  } else if constexpr (N == 1) {
    store_float(type, data, i, x[0]);
  } else if (type == PC_FLOAT32) {
    Global<float>(data).store_vector(
        i, {{pc_float_to_bits(x[0]), pc_float_to_bits(x[1]), pc_float_to_bits(x[2]), pc_float_to_bits(x[3])}});
  } else {
    const bool half = type == PC_FLOAT16;
    const pc_uint64 low = half ? pc_pack<pc_half>(x[0], x[1]) : pc_pack<pc_bfloat16>(x[0], x[1]);
    const pc_uint64 high = half ? pc_pack<pc_half>(x[2], x[3]) : pc_pack<pc_bfloat16>(x[2], x[3]);
    Global<pc_uint64>(data).store(i / 4, low | high << 32);
  }
}

template <int N>
PC_DEVICE void load_floats(const Global<float>& source, pc_int64 i, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = source.load(i);
  } else {
    const pc_vector v = source.load_vector(i);
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = pc_bits_to_float(v.word[k]);
  }
}

// ---- whole rows

// Returns the sink of a head; -infinity if the call has no sinks.
PC_DEVICE float load_sink(const PcAttentionParams& p, int head) { return load_or(p.sinks, head, -pc_infinity()); }

PC_DEVICE void store_lse(const PcAttentionParams& p, int query_row, int head, float lse) {
  if (p.lse != 0) Global<float>(p.lse).store(lse_offset(p, query_row, head), lse);
}

// Returns the first row after the queries of the last sequence.
PC_DEVICE int first_padding_row(const PcAttentionParams& p) {
  if (p.cu_query_lens.data == 0) return p.num_sequences;
  return clamp(begin_index_words(p.cu_query_lens, p.num_sequences).get(p.cu_query_lens.wide != 0), 0, p.num_tokens);
}

// Sets rows from `first_row` on to 0, and their lse to -infinity. The workers share the rows.
PC_DEVICE void clear_padding(const PcAttentionParams& p, const Heads& heads, int first_row) {
  for (int row = first_row + pc_block_x(); row < p.num_tokens; row += pc_num_blocks_x()) {
    for (int head = heads.first; head < heads.first + heads.count; ++head) {
      const pc_int64 at = row_offset(p.out, row, head);
      for (int d = pc_thread(); d < p.value_dim; d += pc_num_threads())
        store_floats<1>(p.out_type, p.out.data, at + d, {0.0f});
      if (pc_thread() == 0) store_lse(p, row, head, -pc_infinity());
    }
  }
}

// ---- parts of rows

// The position of an item among the splits of its tile.
struct Splits {
  int first_row;  // partial row of the tile's first query in split 0
  int step;       // rows between two splits
  int split;
  int count;  // 1: the item writes the output itself

  // The partial row of a query of the item.
  PC_MEMBER pc_int64 row(int query) const { return first_row + static_cast<pc_int64>(split) * step + query; }
};

// `item`: as the planner wrote it, before clamp_queries.
PC_DEVICE Splits splits_of(const PcWorkItem& item) {
  return {item.partial - item.split * item.query_count, item.query_count, item.split, item.num_splits};
}

// `row`: Splits::row().
PC_DEVICE void store_partial_lse(const PcAttentionParams& p, pc_int64 row, int head, float lse) {
  Global<float>(p.partial_lse).store(row * p.num_query_heads + head, lse);
}

// The target of a finished row: a row of the output, or a partial row.
struct ResultRow {
  PcFloat type;
  pc_address data;
  pc_int64 first;  // element of `data` with the row's first dim
  pc_address lse;  // 0: the call wants none
  pc_int64 lse_at;

  PC_MEMBER void store_lse(float x) const {
    if (lse != 0) Global<float>(lse).store(lse_at, x);
  }
};

// Returns the row of the output, or the item's partial row if its tile is split.
PC_DEVICE ResultRow result_row(const PcAttentionParams& p, const PcWorkItem& item, const Splits& splits, int query,
                               int head) {
  if (splits.count == 1) {
    const int query_row = item.query_begin + query;
    return {p.out_type, p.out.data, row_offset(p.out, query_row, head), p.lse, lse_offset(p, query_row, head)};
  }
  const pc_int64 row = splits.row(query) * p.num_query_heads + head;
  return {PC_FLOAT32, p.partial_out, row * p.value_dim, p.partial_lse, row};
}

// ---- joining parts

// Parts of the same rows, `step` partial rows apart.
struct Parts {
  int first_row;
  int step;
  int count;
};

// Counts this CTA among those that have written one of the parts, in the counter of a partial row. Returns true, in all
// threads, if it is the last; the counter is then 0 again. `flag` is one word of shared memory. RowsOf: as in
// join_parts.
template <typename RowsOf = Heads>
PC_DEVICE bool is_last_part(const PcAttentionParams& p, int counter_row, int count, const Shared<int>& flag) {
  pc_sync_block();
  if (pc_thread() == 0) {
    const Global<int> counters(p.counters);
    const pc_int64 at = RowsOf::counter(p, counter_row);
    // Release: the parts of this CTA become visible before its count.
    pc_fence_device();                                          // fault: fence_before_count
    const bool last = counters.atomic_add(at, 1) == count - 1;  // fault: join_one_part_early
    // Acquire: the parts of the other CTAs are read after their counts.
    pc_fence_device();  // fault: fence_after_count
    if (last) counters.store(at, 0);
    flag.store(0, last ? 1 : 0);
  }
  pc_sync_block();
  return flag.load(0) != 0;
}

// The running sum of the parts of a row, for N adjacent elements. Parts are added one by one in the order of their
// keys, so that a row that one CTA folds piece by piece has the same bits as a row that is split.
template <int N>
struct JoinedRow {
  float top;  // largest lse, natural logarithm
  float sum;  // of the parts' denominators, relative to `top`
  float x[N];

  PC_MEMBER void clear() {
    top = -pc_infinity();
    sum = 0.0f;
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = 0.0f;
  }

  // Adds a part by its lse and its normalised sum. A part without keys, -infinity and 0, changes nothing.
  PC_MEMBER void add(float lse, const float (&part)[N]) {
    const float highest = pc_max(top, lse), origin = finite_or_zero(highest);
    const float rescale = pc_exp2((top - origin) * kLog2OfE), weight = pc_exp2((lse - origin) * kLog2OfE);
    top = highest;
    sum = pc_fma(sum, rescale, weight);
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = pc_fma(weight, part[k], x[k] * rescale);
  }

  PC_MEMBER RowEnd end(float sink) const { return end_row(top * kLog2OfE, sum, sink); }
};

// Adds `count` parts that are `lse_step` and `out_step` elements apart.
template <int N>
PC_DEVICE void add_parts(Global<float> lse, Global<float> out, pc_int64 lse_step, pc_int64 out_step, int count,
                         JoinedRow<N>& row) {
  constexpr int kAhead = N == 1 ? 2 : 8;  // parts in flight
  for (; count > 0; count -= kAhead) {
    float part_lse[kAhead], part[kAhead][N];
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      part_lse[i] = -pc_infinity();
      PC_UNROLL
      for (int k = 0; k < N; ++k) part[i][k] = 0.0f;
      if (i < count) {
        part_lse[i] = lse.load(0);
        load_floats<N>(out, 0, part[i]);
      }
      lse = lse + lse_step;
      out = out + out_step;
    }
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) row.add(part_lse[i], part[i]);
  }
}

// Joins parts of an item's rows that all have been written: into the output if they are all parts of the tile
// (`whole`), else into the first of them. RowsOf: Heads, or another division of the item's packed rows.
template <int N, typename RowsOf>
PC_DEVICE void join_parts(const PcAttentionParams& p, const RowsOf& heads, const PcWorkItem& item, const Parts& parts,
                          bool whole) {
  const Global<float> partial_lse(p.partial_lse), partial_out(p.partial_out);
  const pc_int64 lse_step = static_cast<pc_int64>(parts.step) * p.num_query_heads;
  const float row_factor = whole ? load_row_factor(p, heads.kv) : 1.0f;
  const int rows = heads.num_rows(item), vectors = p.value_dim / N;
  for (int task = pc_thread(); task < rows * vectors; task += pc_num_threads()) {
    const int row = task / vectors, d = task % vectors * N;
    const int query = heads.query(row), head = heads.head(row);
    const pc_int64 at = (static_cast<pc_int64>(parts.first_row) + query) * p.num_query_heads + head;
    JoinedRow<N> joined;
    joined.clear();
    add_parts<N>(partial_lse + at, partial_out + (at * p.value_dim + d), lse_step, lse_step * p.value_dim, parts.count,
                 joined);
    const RowEnd end = joined.end(whole ? load_sink(p, head) : -pc_infinity());
    PC_UNROLL
    for (int k = 0; k < N; ++k) joined.x[k] *= end.factor * row_factor;
    const int query_row = item.query_begin + query;
    if (whole) {
      store_floats<N>(p.out_type, p.out.data, row_offset(p.out, query_row, head) + d, joined.x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_floats<N>(PC_FLOAT32, p.partial_out, at * p.value_dim + d, joined.x);
    }
  }
  if (whole) return;
  // Every thread has read the parts' lse before this barrier; the joined lse replaces the first of them.
  pc_sync_block();
  for (int row = pc_thread(); row < rows; row += pc_num_threads()) {
    const int query = heads.query(row), head = heads.head(row);
    const pc_int64 at = (static_cast<pc_int64>(parts.first_row) + query) * p.num_query_heads + head;
    JoinedRow<1> joined;
    joined.clear();
    for (int i = 0; i < parts.count; ++i) joined.add(partial_lse.load(at + i * lse_step), {0.0f});
    partial_lse.store(at, joined.end(-pc_infinity()).lse);
  }
}

// Joins the parts of a split item if this CTA is the last to write one; call it after the CTA's part is written.
//
// With more than 48 parts the join has two levels: the last CTA of each 16 parts joins these, and the last CTA of the
// groups joins their results, so that a sequence split over the whole device does not wait for one CTA to read all
// parts. With fold_tokens the parts are joined in one level, as a fold joins them. N == 4 requires value_dim and the
// strides of the output to be multiples of 4.
template <int N, typename RowsOf>
PC_DEVICE void join_if_last(const PcAttentionParams& p, const RowsOf& heads, const PcWorkItem& item,
                            const Splits& splits, const Shared<int>& flag) {
  constexpr int kManyParts = 48, kTogether = 16;
  const bool many = splits.count > kManyParts && p.fold_tokens == 0;
  for (int level = many ? 0 : 1; level < 2; ++level) {
    Parts parts = {splits.first_row, splits.step, splits.count};
    int counter_row = splits.first_row;
    if (level == 0) {
      const int first = splits.split / kTogether * kTogether;
      parts.first_row += first * splits.step;
      parts.count = min_of(splits.count - first, kTogether);
      counter_row = parts.first_row;
    } else if (many) {
      parts.step *= kTogether;
      parts.count = ceil_div(splits.count, kTogether);
      counter_row += splits.step;  // the first level does not use this counter
    }
    if (!is_last_part<RowsOf>(p, counter_row, parts.count, flag)) return;
    join_parts<N>(p, heads, item, parts, level == 1);
  }
}

}  // namespace pagecore
