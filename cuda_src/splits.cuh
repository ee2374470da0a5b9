// Results: rows of the output, the parts of tiles whose keys are split, and how the last CTA of a tile joins them.
#pragma once

#include "scores.cuh"

namespace pagecore {

// ---- numbers of a type that is known at run time only

PC_DEVICE float load_float(PcFloat type, pc_address data, pc_int64 i) {
  if (type == PC_FLOAT32) return Global<float>(data).load(i);
  if (type == PC_FLOAT16) return pc_to_float(Global<pc_half>(data).load(i));
  return pc_to_float(Global<pc_bfloat16>(data).load(i));
}

PC_DEVICE void store_float(PcFloat type, pc_address data, pc_int64 i, float x) {
  if (type == PC_FLOAT32) {
    Global<float>(data).store(i, x);
  } else if (type == PC_FLOAT16) {
    Global<pc_half>(data).store(i, pc_from_float<pc_half>(x));
  } else {
    Global<pc_bfloat16>(data).store(i, pc_from_float<pc_bfloat16>(x));
  }
}

// N numbers next to each other, N == 1 or 4; four lie at a multiple of 4.
template <int N>
PC_DEVICE void store_floats(PcFloat type, pc_address data, pc_int64 i, const float (&x)[N]) {
  if constexpr (N == 1) {
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

// The sink of a head; -infinity where there is none.
PC_DEVICE float load_sink(const PcAttentionParams& p, int head) { return load_number(p.sinks, head, -pc_infinity()); }

PC_DEVICE void store_lse(const PcAttentionParams& p, int query_row, int head, float lse) {
  if (p.lse != 0) Global<float>(p.lse).store(lse_offset(p, query_row, head), lse);
}

// The first row behind the last sequence's queries.
PC_DEVICE int first_padding_row(const PcAttentionParams& p) {
  if (p.cu_query_lens.data == 0) return p.num_sequences;
  return clamp(load_index(p.cu_query_lens, p.num_sequences), 0, p.num_tokens);
}

// Rows from that one on: 0, and -infinity as lse. The workers share them.
PC_DEVICE void clear_padding(const PcAttentionParams& p, const Heads& heads, int first_row) {
  for (int row = first_row + pc_block_x(); row < p.num_tokens; row += pc_num_blocks_x()) {
    for (int head = heads.first; head < heads.first + heads.count; ++head) {
      const pc_int64 at = row_offset(p.out, row, head);
      for (int d = pc_thread(); d < p.value_dim; d += pc_num_threads())
        store_float(p.query_type, p.out.data, at + d, 0);
      if (pc_thread() == 0) store_lse(p, row, head, -pc_infinity());
    }
  }
}

PC_DEVICE void clear_padding(const PcAttentionParams& p, const Heads& heads) {
  clear_padding(p, heads, first_padding_row(p));
}

// ---- parts of rows

// Where an item stands among the splits of its tile.
struct Splits {
  int first_row;  // partial row of the tile's first query, split 0
  int step;       // rows between two splits
  int split;
  int count;  // 1: the item writes the output itself

  PC_MEMBER pc_int64 row(int query) const { return first_row + static_cast<pc_int64>(split) * step + query; }
};

// Of an item as the planner wrote it.
PC_DEVICE Splits splits_of(const PcWorkItem& item) {
  return {item.partial - item.split * item.query_count, item.query_count, item.split, item.num_splits};
}

// A part's own normalised sum, N numbers from element d on; `row` is Splits::row().
template <int N>
PC_DEVICE void store_partial(const PcAttentionParams& p, pc_int64 row, int head, int d, const float (&x)[N]) {
  store_floats<N>(PC_FLOAT32, p.partial_out, (row * p.num_query_heads + head) * p.value_dim + d, x);
}

PC_DEVICE void store_partial_lse(const PcAttentionParams& p, pc_int64 row, int head, float lse) {
  Global<float>(p.partial_lse).store(row * p.num_query_heads + head, lse);
}

// Parts of the same rows, `step` partial rows apart.
struct Parts {
  int first_row;
  int step;
  int count;
};

// Counts the CTAs that have written one of these parts, by the counter of a partial row; true for the last of them, in
// all threads. The counter is 0 again then. `flag` is one word of shared memory.
PC_DEVICE bool is_last_part(const PcAttentionParams& p, int counter_row, int count, const Shared<int>& flag) {
  pc_sync_block();
  if (pc_thread() == 0) {
    const Global<int> counters(p.counters);
    const pc_int64 tile = static_cast<pc_int64>(counter_row) * p.num_kv_heads + pc_block_y();
    const pc_int64 at = tile * pc_num_blocks_z() + pc_block_z();
    pc_fence_device();  // what the block has written is seen before its count is
    const bool last = counters.atomic_add(at, 1) == count - 1;
    pc_fence_device();  // and what the others wrote is read after theirs
    if (last) counters.store(at, 0);
    flag.store(0, last ? 1 : 0);
  }
  pc_sync_block();
  return flag.load(0) != 0;
}

// What the parts of a row add up to, N neighbours of it. Parts join one by one, in the order of their keys: whoever
// folds the pieces of a row that is not split gets the bits of one that is.
template <int N>
struct JoinedRow {
  float top;  // largest lse, natural logarithm
  float sum;  // of the parts' denominators, counted from `top`
  float x[N];

  PC_MEMBER void clear() {
    top = -pc_infinity();
    sum = 0.0f;
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = 0.0f;
  }

  // A part's lse and its own normalised sum. One without keys, -infinity and 0, changes nothing.
  PC_MEMBER void add(float lse, const float (&part)[N]) {
    const float highest = pc_max(top, lse), origin = finite_or_zero(highest);
    const float keep = pc_exp2((top - origin) * kLog2OfE), weight = pc_exp2((lse - origin) * kLog2OfE);
    top = highest;
    sum = pc_fma(sum, keep, weight);
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = pc_fma(weight, part[k], x[k] * keep);
  }

  PC_MEMBER RowEnd end(float sink) const { return end_row(top * kLog2OfE, sum, sink); }
};

// `count` parts, `lse_step` and `out_step` apart.
template <int N>
PC_DEVICE void add_parts(Global<float> lse, Global<float> out, pc_int64 lse_step, pc_int64 out_step, int count,
                         JoinedRow<N>& row) {
  constexpr int kAhead = N == 1 ? 2 : 8;  // that are on their way at once
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

// Joins parts of an item's rows that are all there: into the output where they are all that there is, else into the
// first of them.
template <int N>
PC_DEVICE void join_parts(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, const Parts& parts,
                          bool whole) {
  const Global<float> partial_lse(p.partial_lse), partial_out(p.partial_out);
  const pc_int64 lse_step = static_cast<pc_int64>(parts.step) * p.num_query_heads;
  const float value_scale = whole ? load_number(p.value_scale, heads.kv, 1.0f) : 1.0f;
  const int rows = item.query_count * heads.count, vectors = p.value_dim / N;
  for (int task = pc_thread(); task < rows * vectors; task += pc_num_threads()) {
    const int row = task / vectors, d = task % vectors * N;
    const int query = row / heads.count, head = heads.first + row % heads.count;
    const pc_int64 at = (static_cast<pc_int64>(parts.first_row) + query) * p.num_query_heads + head;
    JoinedRow<N> joined;
    joined.clear();
    add_parts<N>(partial_lse + at, partial_out + (at * p.value_dim + d), lse_step, lse_step * p.value_dim, parts.count,
                 joined);
    const RowEnd end = joined.end(whole ? load_sink(p, head) : -pc_infinity());
    PC_UNROLL
    for (int k = 0; k < N; ++k) joined.x[k] *= end.factor * value_scale;
    const int query_row = item.query_begin + query;
    if (whole) {
      store_floats<N>(p.query_type, p.out.data, row_offset(p.out, query_row, head) + d, joined.x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_floats<N>(PC_FLOAT32, p.partial_out, at * p.value_dim + d, joined.x);
    }
  }
  if (whole) return;
  // The weights are not needed any more behind the barrier.
  pc_sync_block();
  for (int row = pc_thread(); row < rows; row += pc_num_threads()) {
    const int query = row / heads.count, head = heads.first + row % heads.count;
    const pc_int64 at = (static_cast<pc_int64>(parts.first_row) + query) * p.num_query_heads + head;
    JoinedRow<1> joined;
    joined.clear();
    for (int i = 0; i < parts.count; ++i) joined.add(partial_lse.load(at + i * lse_step), {0.0f});
    partial_lse.store(at, joined.end(-pc_infinity()).lse);
  }
}

// Called when the CTA's part of an item that is split has been written: whoever comes last joins them. Of many parts,
// whoever comes last of 16 joins those, and the last of these joins what they have got, so that a sequence that is
// split over the whole machine does not wait for one CTA to read it all. Where rows are folded they are joined in one
// go, as a fold does it. N == 4 wants a value_dim and rows of the output that are multiples of 4.
template <int N>
PC_DEVICE void join_if_last(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item,
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
      parts.count = divide_up(splits.count, kTogether);
      counter_row += splits.step;  // which counts for no 16
    }
    if (!is_last_part(p, counter_row, parts.count, flag)) return;
    join_parts<N>(p, heads, item, parts, level == 1);
  }
}

// As prompts have it: few parts.
PC_DEVICE bool is_last_part(const PcAttentionParams& p, const Splits& splits, const Shared<int>& flag) {
  return is_last_part(p, splits.first_row, splits.count, flag);
}

template <int N>
PC_DEVICE void join_splits(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item,
                           const Splits& splits) {
  join_parts<N>(p, heads, item, {splits.first_row, splits.step, splits.count}, true);
}

}  // namespace pagecore
