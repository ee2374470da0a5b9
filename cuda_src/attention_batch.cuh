// What the attention kernels read of a batch: items, sequences, heads, and where tokens lie.
//
// Lengths, rows and block ids come from arrays that nobody has checked. Whatever they hold, what is read lies in the
// arrays that the parameters describe: lengths are cut to what a row of the table holds, a row that the table does not
// have holds nothing, and a block that the cache does not have is block 0.
#pragma once

#include "abi_attention.h"
#include "logarithms.cuh"
#include "primitives.cuh"

namespace pagecore {

PC_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
PC_DEVICE int max_of(int a, int b) { return a > b ? a : b; }
// `low` where that is above `high`.
PC_DEVICE int clamp(pc_int64 x, int low, int high) {
  return x < low || high < low ? low : x > high ? high : static_cast<int>(x);
}
PC_DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

// An integer of 32 or 64 bits that is still on its way. Nothing waits for it before it is asked for.
struct IntegerOnItsWay {
  pc_uint32 low;
  pc_uint32 high;  // of 64 bits

  PC_MEMBER pc_int64 arrived(bool wide) const {
    if (!wide) return static_cast<pc_int32>(low);
    return static_cast<pc_int64>(static_cast<pc_uint64>(high) << 32 | low);
  }
};

// In words, unlike ask_index of units.cuh: by loads of 64 bits, prefill with a head_dim of 128 spills.
PC_DEVICE IntegerOnItsWay begin_integer(pc_address data, pc_int64 at, bool wide) {
  const Global<pc_uint32> words(data);
  IntegerOnItsWay integer = {0, 0};
  if (wide) integer.high = words.load(2 * at + 1);
  integer.low = words.load(wide ? 2 * at : at);
  return integer;
}

PC_DEVICE IntegerOnItsWay begin_index(const PcIndices& array, int i) {
  return begin_integer(array.data, i * array.stride, array.wide != 0);
}

PC_DEVICE pc_int64 load_index(const PcIndices& array, int i) { return begin_index(array, i).arrived(array.wide != 0); }

PC_DEVICE float load_number(pc_address array, int i, float absent) {
  return array == 0 ? absent : Global<float>(array).load(i);
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

// The query heads that a CTA works for: those of key head y, or where they are more than an item's rows, chunk z of
// them. The grid is (num_workers, num_kv_heads, head_chunks).
struct Heads {
  int kv;
  int first;  // query head
  int count;
};

PC_DEVICE Heads block_heads(const PcAttentionParams& p, int z) {
  const int group = p.num_query_heads / p.num_kv_heads;
  const int size = divide_up(group, pc_num_blocks_z());
  const int begin = size * z;
  return {pc_block_y(), pc_block_y() * group + begin, clamp(group - begin, 0, size)};
}
PC_DEVICE Heads block_heads(const PcAttentionParams& p) { return block_heads(p, pc_block_z()); }
// The same numbers, computed here rather than kept in registers since they were computed before.
PC_DEVICE Heads block_heads_again(const PcAttentionParams& p) { return block_heads(p, pc_opaque(pc_block_z())); }

// ---- sequences

struct Sequence {
  int index;
  int length;         // keys
  int queries_begin;  // rows of the packed queries
  int queries_end;
  pc_int64 table_row;  // entry of the table where its blocks begin

  // Of a row of the packed queries. Negative where there are more queries than keys.
  PC_MEMBER int position(int query_row) const { return length - (queries_end - query_row); }
};

// Of a row of the table; a tile behind them still has numbers of 32 bits.
PC_DEVICE int held_tokens(const PcAttentionParams& p) {
  return clamp(static_cast<pc_int64>(p.table.width) * p.block_size, 0, 0x7fff0000);
}

PC_DEVICE Sequence load_sequence(const PcAttentionParams& p, int index) {
  Sequence s;
  s.index = clamp(index, 0, p.num_sequences - 1);
  s.queries_begin = s.index;
  s.queries_end = s.index + 1;
  pc_int64 row = s.index;
  // All are on their way before any is looked at.
  IntegerOnItsWay row_read = {0, 0}, begin_read = {0, 0}, end_read = {0, 0};
  const IntegerOnItsWay length_read = begin_index(p.seq_lens, s.index);
  if (p.rows.data != 0) row_read = begin_index(p.rows, s.index);
  if (p.cu_query_lens.data != 0) {
    begin_read = begin_index(p.cu_query_lens, s.index);
    end_read = begin_index(p.cu_query_lens, s.index + 1);
  }
  if (p.rows.data != 0) row = row_read.arrived(p.rows.wide != 0);
  if (p.cu_query_lens.data != 0) {
    s.queries_begin = clamp(begin_read.arrived(p.cu_query_lens.wide != 0), 0, p.num_tokens);
    s.queries_end = clamp(end_read.arrived(p.cu_query_lens.wide != 0), 0, p.num_tokens);
  }
  const bool exists = row >= 0 && row < p.table.num_rows;
  s.length = exists ? clamp(length_read.arrived(p.seq_lens.wide != 0), 0, held_tokens(p)) : 0;
  s.table_row = exists ? row * p.table.row_stride : 0;
  return s;
}

// Keys begin .. end - 1.
struct KeyRange {
  int begin;
  int end;

  PC_MEMBER bool has(int j) const { return static_cast<unsigned>(j - begin) < static_cast<unsigned>(end - begin); }
  PC_MEMBER KeyRange only_if(bool condition) const { return {begin, condition ? end : begin}; }
  // Whether some of keys j .. j + count - 1 are among them.
  PC_MEMBER bool meets(int j, int count) const { return j < end && j + count > begin; }
};

// What causality and the window leave to a query; the rule of pagecore/ops/key_range.hpp.
PC_DEVICE KeyRange attended_keys(const PcAttentionParams& p, int position, int length) {
  const pc_int64 right = p.causal != 0 ? 0 : p.window_right;
  const pc_int64 first = static_cast<pc_int64>(position) - p.window_left;
  const pc_int64 last = static_cast<pc_int64>(position) + right;
  const int begin = p.window_left < 0 ? 0 : clamp(first, 0, length);
  return {begin, right < 0 ? length : clamp(last + 1, begin, length)};
}

// A plan can be older than the lengths: the queries of an item that are there,
PC_DEVICE void fit_queries(const PcAttentionParams& p, PcWorkItem& item) {
  item.query_begin = clamp(item.query_begin, 0, p.num_tokens);
  item.query_count = clamp(item.query_count, 0, p.num_tokens - item.query_begin);
}

// and those of its keys that one of these queries attends to.
PC_DEVICE void fit_item(const PcAttentionParams& p, const Sequence& sequence, PcWorkItem& item) {
  fit_queries(p, item);
  const int first = sequence.position(item.query_begin);
  const KeyRange a = attended_keys(p, first, sequence.length);
  const KeyRange b = attended_keys(p, first + item.query_count - 1, sequence.length);
  item.key_begin = clamp(item.key_begin, a.begin, b.end);
  item.key_end = item.query_count == 0 ? item.key_begin : clamp(item.key_end, item.key_begin, b.end);
}

// ---- where tokens lie

struct Slot {
  int block;
  int offset;  // token in the block
};

// A slot whose block is still on its way from the table.
struct SlotOnItsWay {
  IntegerOnItsWay block;
  int offset;

  PC_MEMBER Slot arrived(const PcAttentionParams& p) const {
    const bool exists = block.high == 0 && block.low < static_cast<pc_uint32>(p.num_blocks);
    return {exists ? static_cast<int>(block.low) : 0, offset};
  }
};

// Of a token that the sequence has.
PC_DEVICE SlotOnItsWay begin_slot(const PcAttentionParams& p, pc_int64 table_row, int token) {
  const int i = p.block_shift >= 0 ? token >> p.block_shift : token / p.block_size;
  return {begin_integer(p.table.data, table_row + i, p.table.wide != 0), token - i * p.block_size};
}

PC_DEVICE Slot find_slot(const PcAttentionParams& p, pc_int64 table_row, int token) {
  return begin_slot(p, table_row, token).arrived(p);
}

// Of a slot's first element within its head.
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

// The bytes of one query: of key j at begin + j.
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

}  // namespace pagecore
