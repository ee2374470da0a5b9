// Inputs of the attention kernels: items, sequences, heads, and the slots of tokens.
//
// Lengths, rows and block ids come from arrays that are not validated. Whatever they hold, the kernels read only inside
// the arrays that the parameters describe: a length is clamped to the capacity of its row of the table, a sequence
// whose row is not in the table has length 0, and a block id outside the cache is replaced by block 0.
#pragma once

#include "cuda_src/abi/attention.h"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

PC_DEVICE float load_or(pc_address array, int i, float absent) {
  return array == 0 ? absent : Global<float>(array).load(i);
}

// The factor of the output by its own scale.
PC_DEVICE float load_out_factor(const PcAttentionParams& p) {
  return p.out_scale == 0 ? p.out_factor : 1.0f / Global<float>(p.out_scale).load(0);
}

// The factor of a row of the output: the given one of the values of a key head, times that of the output.
PC_DEVICE float load_row_factor(const PcAttentionParams& p, int kv_head) {
  return load_or(p.value_scale, kv_head * p.value_scale_stride, 1.0f) * load_out_factor(p);
}

// ---- work

// Items first .. end - 1 of the schedule.
struct WorkRange {
  int first;
  int end;
};

PC_DEVICE WorkRange load_work(const PcSchedule& schedule, int worker) {
  const Global<pc_int32> first_item(schedule.first_item);
  return {first_item.load(worker), first_item.load(worker + 1)};
}

PC_DEVICE PcWorkItem load_item(const PcSchedule& schedule, int i) {
  const Global<pc_int32> items(schedule.items);
  const pc_vector a = items.load_vector(8LL * i), b = items.load_vector(8LL * i + 4);
  return {static_cast<int>(a.word[0]), static_cast<int>(a.word[1]), static_cast<int>(a.word[2]),
          static_cast<int>(a.word[3]), static_cast<int>(b.word[0]), static_cast<int>(b.word[1]),
          static_cast<int>(b.word[2]), static_cast<int>(b.word[3])};
}

// The query heads of a CTA: all heads of key head y, or, if an item cannot hold them, chunk z of these heads. The grid
// is (num_workers, num_kv_heads, head_chunks).
struct Heads {
  int kv;
  int first;  // query head
  int count;

  // The packed rows of an item, and the query and the head of each.
  PC_MEMBER int num_rows(const PcWorkItem& item) const { return item.query_count * count; }
  PC_MEMBER int query(int row) const { return row / count; }
  PC_MEMBER int head(int row) const { return first + row % count; }
  // The counter of a partial row.
  PC_MEMBER static pc_int64 counter(const PcAttentionParams& p, int row) {
    return (static_cast<pc_int64>(row) * p.num_kv_heads + pc_block_y()) * pc_num_blocks_z() + pc_block_z();
  }
};

PC_DEVICE Heads block_heads(const PcAttentionParams& p, int z) {
  const int group = p.num_query_heads / p.num_kv_heads;
  const int size = ceil_div(group, pc_num_blocks_z());
  const int begin = size * z;
  return {pc_block_y(), pc_block_y() * group + begin, clamp(group - begin, 0, size)};
}
PC_DEVICE Heads block_heads(const PcAttentionParams& p) { return block_heads(p, pc_block_z()); }
// Computes the heads again, so that they need not be kept in registers across a loop.
PC_DEVICE Heads recompute_block_heads(const PcAttentionParams& p) { return block_heads(p, pc_opaque(pc_block_z())); }

// ---- sequences

struct Sequence {
  int index;
  int length;         // keys
  int queries_begin;  // rows of the packed queries
  int queries_end;
  pc_int64 table_row;  // element of the table with the first block of the sequence

  // The position of a row of the packed queries. Negative if the sequence has more queries than keys.
  PC_MEMBER int position(int query_row) const { return length - (queries_end - query_row); }
  // The least position of a row from `query_row` on: in a tree, any row may be the child of the last token before it.
  template <bool kTree>
  PC_MEMBER int least_position(const PcAttentionParams& p, int query_row) const {
    return position(kTree && p.tree.words != 0 ? queries_begin : query_row);
  }
};

// Tokens that a row of the table can hold. The limit leaves room for the token numbers of one more tile in 32 bits.
PC_DEVICE int row_capacity(const PcAttentionParams& p) {
  return clamp(static_cast<pc_int64>(p.table.width) * p.block_size, 0, 0x7fff0000);
}

PC_DEVICE Sequence load_sequence(const PcAttentionParams& p, int index) {
  Sequence s;
  s.index = clamp(index, 0, p.num_sequences - 1);
  s.queries_begin = s.index;
  s.queries_end = s.index + 1;
  pc_int64 row = s.index;
  // Issue all loads before the first use of a result.
  PendingIndex pending_row = {0, 0}, pending_begin = {0, 0}, pending_end = {0, 0};
  const PendingIndex pending_length = begin_index_words(p.seq_lens, s.index);
  if (p.rows.data != 0) pending_row = begin_index_words(p.rows, s.index);
  if (p.cu_query_lens.data != 0) {
    pending_begin = begin_index_words(p.cu_query_lens, s.index);
    pending_end = begin_index_words(p.cu_query_lens, s.index + 1);
  }
  if (p.rows.data != 0) row = pending_row.get(p.rows.wide != 0);
  if (p.cu_query_lens.data != 0) {
    s.queries_begin = clamp(pending_begin.get(p.cu_query_lens.wide != 0), 0, p.num_tokens);
    s.queries_end = clamp(pending_end.get(p.cu_query_lens.wide != 0), 0, p.num_tokens);
  }
  const bool exists = row >= 0 && row < p.table.num_rows;
  s.length = exists ? clamp(pending_length.get(p.seq_lens.wide != 0), 0, row_capacity(p)) : 0;
  s.table_row = exists ? row * p.table.row_stride : 0;
  return s;
}

// Keys begin .. end - 1.
struct KeyRange {
  int begin;
  int end;

  PC_MEMBER bool has(int j) const { return static_cast<unsigned>(j - begin) < static_cast<unsigned>(end - begin); }
  PC_MEMBER KeyRange only_if(bool condition) const { return {begin, condition ? end : begin}; }
  // Returns true if the range has one of the keys j .. j + count - 1.
  PC_MEMBER bool overlaps(int j, int count) const { return j < end && j + count > begin; }
};

// Keys that a query may attend to under the causal rule and the window or chunk, as in pagecore/ops/key_range.hpp.
// Sinks are left out.
PC_DEVICE KeyRange attended_keys(const PcAttentionParams& p, int position, int length) {
  const pc_int64 right = p.causal != 0 ? 0 : p.window_right;
  const pc_int64 first = static_cast<pc_int64>(position) - p.window_left;
  const pc_int64 last = static_cast<pc_int64>(position) + right;
  KeyRange keys;
  keys.begin = p.window_left < 0 ? 0 : clamp(first, 0, length);
  keys.end = right < 0 ? length : clamp(last + 1, keys.begin, length);
  if (p.window_left < -1) {
    const int chunk = -1 - pc_opaque(p.window_left);
    const int start = max_of(position, 0) / chunk * chunk;
    keys.begin = min_of(start, length);
    keys.end = keys.begin + min_of(max_of(keys.end - start, 0), position < 0 ? 0 : chunk);
  }
  return keys;
}

// The first key of an item that a query may attend to, whose window begins at `begin`. An item that begins before the
// end of the sinks has sinks only, which no window leaves out.
template <bool kSinks>
PC_DEVICE int first_of_item(const PcAttentionParams& p, const PcWorkItem& item, int begin) {
  // As unsigned numbers: a negative key, which no plan has, is not a sink.
  const bool is_sinks = static_cast<pc_uint32>(item.key_begin) < static_cast<pc_uint32>(p.sink_tokens);
  return kSinks && is_sinks ? item.key_begin : begin;
}

// A plan can be older than the lengths. Clamps the queries of an item to those that exist.
PC_DEVICE void clamp_queries(const PcAttentionParams& p, PcWorkItem& item) {
  item.query_begin = clamp(item.query_begin, 0, p.num_tokens);
  item.query_count = clamp(item.query_count, 0, p.num_tokens - item.query_begin);
}

// Clamps the keys to those that at least one of the queries, which are clamped, attends to.
template <typename Options>
PC_DEVICE void clamp_keys(const PcAttentionParams& p, const Sequence& sequence, PcWorkItem& item) {
  const int first = sequence.position(item.query_begin);
  const KeyRange a = attended_keys(p, sequence.least_position<Options::kTree>(p, item.query_begin), sequence.length);
  const KeyRange b = attended_keys(p, first + item.query_count - 1, sequence.length);
  item.key_begin = clamp(item.key_begin, first_of_item<Options::kSinks>(p, item, a.begin), b.end);
  item.key_end = item.query_count == 0 ? item.key_begin : clamp(item.key_end, item.key_begin, b.end);
}

template <typename Options>
PC_DEVICE void clamp_item(const PcAttentionParams& p, const Sequence& sequence, PcWorkItem& item) {
  clamp_queries(p, item);
  clamp_keys<Options>(p, sequence, item);
}

// ---- slots

struct Slot {
  int block;
  int offset;  // token in the block
};

// A slot whose block id is being loaded from the table.
struct PendingSlot {
  PendingIndex block;
  int offset;

  PC_MEMBER Slot get(const PcAttentionParams& p) const {
    const bool exists = block.high == 0 && block.low < static_cast<pc_uint32>(p.num_blocks);
    return {exists ? static_cast<int>(block.low) : 0, offset};
  }
};

// `token` must be a token of the sequence.
PC_DEVICE PendingSlot begin_slot(const PcAttentionParams& p, pc_int64 table_row, int token) {
  const int i = p.block_shift >= 0 ? token >> p.block_shift : token / p.block_size;
  return {begin_index_words(p.table.data, table_row + i, p.table.wide != 0), token - i * p.block_size};
}

PC_DEVICE Slot load_slot(const PcAttentionParams& p, pc_int64 table_row, int token) {
  return begin_slot(p, table_row, token).get(p);
}

// Elements from the start of a head's plane to a slot.
PC_DEVICE pc_int64 slot_offset(const PcCache& cache, Slot slot) {
  return slot.block * cache.block_stride + slot.offset * cache.token_stride;
}

PC_DEVICE pc_int64 row_offset(const PcRows& rows, int token, int head) {
  return token * rows.token_stride + head * rows.head_stride;
}

PC_DEVICE pc_int64 lse_offset(const PcAttentionParams& p, int token, int head) {
  return token * p.lse_token_stride + head * p.lse_head_stride;
}

// ---- the mask

// The mask bytes of one query; the byte of key j is at begin + j.
struct MaskRow {
  pc_int64 begin;

  PC_MEMBER bool has(const PcAttentionParams& p, int j) const {
    const pc_int64 at = begin + j;
    return at >= 0 && at < p.mask_size && Global<pc_uint8>(p.mask).load(at) != 0;
  }
};

PC_DEVICE MaskRow load_mask_row(const PcAttentionParams& p, const Sequence& sequence, int query_row) {
  if (p.mask == 0) return {0};
  const pc_int64 start = Global<pc_int64>(p.mask_starts).load(sequence.index);
  return {start + static_cast<pc_int64>(query_row - sequence.queries_begin) * sequence.length};
}

// True if a mask may leave out any key, and not only new tokens of a tree.
PC_DEVICE bool masks_all_keys(const PcAttentionParams& p) { return p.mask != 0 && p.tree.words == 0; }

}  // namespace pagecore
