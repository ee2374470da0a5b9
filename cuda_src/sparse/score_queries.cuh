// The query rows of one token and key head, as block_scores.cu multiplies them.
#pragma once

#include "cuda_src/abi/sparse.h"
#include "cuda_src/device/floats.cuh"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

// The query of a block of threads, and its sequence.
struct ScoredQuery {
  int token;
  int head;
  int visible;         // entries; 0 for padding
  pc_int64 table_row;  // element of the table with the first block
};

// Returns the end of the queries of a sequence.
PC_DEVICE pc_int64 queries_end(const PcScoreParams& p, int sequence) {
  return load_index(p.cu_query_lens, sequence + 1);
}

// Returns the first sequence whose queries end after `token`, or num_sequences. A warp tests 32 sequences at a time.
PC_DEVICE int find_sequence(const PcScoreParams& p, int token) {
  if (p.cu_query_lens.data == 0) return min_of(token, p.num_sequences);
  int low = 0, high = p.num_sequences;
  while (low < high) {
    const int step = ceil_div(high - low, 32), at = low + (pc_lane() + 1) * step - 1;
    const bool ends = at < high && queries_end(p, at) <= token;
    low += pc_count_bits(pc_ballot(ends)) * step;
    high = min_of(high, low + step - 1);
  }
  return min_of(low, p.num_sequences);
}

// `unit`: tokens of an entry. `labels`: the query's own token is not visible.
PC_DEVICE ScoredQuery load_scored_query(const PcScoreParams& p, int unit, bool labels) {
  ScoredQuery query = {pc_block_x() / p.num_kv_heads, pc_block_x() % p.num_kv_heads, 0, 0};
  const int sequence = find_sequence(p, query.token);
  if (sequence >= p.num_sequences) return query;
  const pc_int64 row = p.rows.data != 0 ? load_index(p.rows, sequence) : sequence;
  if (row < 0 || row >= p.table.num_rows) return query;
  const pc_int64 room = static_cast<pc_int64>(p.table.width) * p.block_size;
  const int length = clamp(load_index(p.seq_lens, sequence), 0, clamp(room, 0, 0x7fff0000));
  const pc_int64 end = p.cu_query_lens.data != 0 ? queries_end(p, sequence) : sequence + 1;
  const pc_int64 position = length - (end - query.token);
  const int tokens = clamp(labels ? position : p.causal != 0 ? position + 1 : length, 0, length);
  query.visible = tokens > 0 ? min_of((tokens - 1) / unit + 1, p.width) : 0;
  query.table_row = row * p.table.row_stride;
  return query;
}

PC_DEVICE float query_element(const PcScoreParams& p, const ScoredQuery& query, int member, int d) {
  const int head = query.head * p.group + member;
  return load_float(p.query_type, p.query.data, query.token * p.query.token_stride + head * p.query.head_stride + d);
}

// Stores query rows first .. first + count - 1 of a key head, [count, stride], padded with zeros; or their mean.
PC_DEVICE void load_rows(const PcScoreParams& p, const ScoredQuery& query, int first, int count, int stride,
                         const Shared<float>& rows) {
  for (int i = pc_thread(); i < count * stride; i += pc_num_threads()) {
    const int row = i / stride, d = i % stride;
    float x = 0.0f;
    if (d < p.dim && p.mean != 0) {
      for (int g = 0; g < p.group; ++g) x += query_element(p, query, g, d);
      x /= static_cast<float>(p.group);
    } else if (d < p.dim) {
      x = query_element(p, query, first + row, d);
    }
    rows.store(i, x);
  }
}

// Stores the query label of a key head, [stride], padded with zeros: for each channel the number of the group with the
// largest magnitude, the first of equals, or the mean.
PC_DEVICE void load_label(const PcScoreParams& p, const ScoredQuery& query, int stride, const Shared<float>& rows) {
  for (int s = pc_thread(); s < stride; s += pc_num_threads()) {
    float reduced = 0.0f;
    if (s < p.dim) {
      const int channel = clamp(Global<int>(p.channels).load(query.head * p.dim + s), 0, p.query_dim - 1);
      for (int g = 0; g < p.group; ++g) {
        const float x = query_element(p, query, g, channel);
        if (p.mean != 0) {
          reduced += x;
        } else if (g == 0 || pc_max(x, -x) > pc_max(reduced, -reduced)) {
          reduced = x;
        }
      }
      if (p.mean != 0) reduced /= static_cast<float>(p.group);
    }
    rows.store(s, reduced);
  }
}

}  // namespace pagecore
