// Keys that a key head selects (PcSelection): the map between their numbers and their positions.
//
//   entries, of unit 4     |   2   |   3   |   9   |            ascending blocks or tokens
//   positions              8 .. 11 12 .. 15 36 .. 39
//   numbers                0 ..  3  4 ..  7  8 .. 11
//
// Items, tiles, splits and folds count in numbers, as they count in positions without a selection. Windows, masks and
// biases use positions. Whatever the lists hold, positions are inside the row of the table.
#pragma once

#include "cuda_src/attention/inputs/batch.cuh"

namespace pagecore {

// The list of one sequence and of the key head of the block of threads.
struct SelectedKeys {
  pc_int64 first;  // element of the entries
  int count;

  // Entries are below 2^31. Of an int64 the low word is read, which is -1 for -1.
  PC_MEMBER int entry(const PcAttentionParams& p, int i) const {
    const pc_int64 at = first + i;
    return Global<int>(p.selection.entries).load(p.selection.wide != 0 ? 2 * at : at);
  }

  // The entry that has key `number`.
  PC_MEMBER static int entry_of(const PcAttentionParams& p, int number) {
    return p.selection.unit_shift >= 0 ? number >> p.selection.unit_shift : number / p.selection.unit;
  }
  // The position of key `number`, given its entry.
  PC_MEMBER static int position_in(const PcAttentionParams& p, int entry, int number) {
    const int within = number - entry_of(p, number) * p.selection.unit;
    return clamp(static_cast<pc_int64>(entry) * p.selection.unit + within, 0, row_capacity(p) - 1);
  }
  PC_MEMBER int position(const PcAttentionParams& p, int number) const {
    return position_in(p, entry(p, entry_of(p, number)), number);
  }

  // The number of selected keys before a position.
  PC_MEMBER int before(const PcAttentionParams& p, int position) const {
    if (count == 0 || position <= 0) return 0;
    const pc_int64 unit = p.selection.unit;
    const int last = entry(p, count - 1);
    if (last >= 0 && last * unit < position) return up_to(p, count - 1, last, position);
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      const int at = entry(p, middle);
      if (at >= 0 && at * unit + unit <= position) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int start = low < count ? entry(p, low) : -1;
    return start >= 0 && start * unit < position ? up_to(p, low, start, position) : low * p.selection.unit;
  }

 private:
  // The number of keys before a position that is in entry i, or after it.
  PC_MEMBER static int up_to(const PcAttentionParams& p, int i, int entry, int position) {
    const pc_int64 start = static_cast<pc_int64>(entry) * p.selection.unit;
    return i * p.selection.unit + clamp(position - start, 0, p.selection.unit);
  }
};

PC_DEVICE SelectedKeys load_selected(const PcAttentionParams& p, const Sequence& sequence) {
  const PcSelection& s = p.selection;
  SelectedKeys keys;
  keys.first = sequence.index * s.sequence_stride + pc_block_y() * s.head_stride;
  keys.count = min_of(s.width, 0x7fff0000 / s.unit);  // numbers are below 2^31, with room for one more tile
  if (s.counts != 0) {
    const pc_int64 at = sequence.index * s.counts_sequence_stride + pc_block_y() * s.counts_head_stride;
    keys.count = clamp(begin_index_words(s.counts, at, s.counts_wide != 0).get(s.counts_wide != 0), 0, keys.count);
  }
  return keys;
}

// A range of positions in numbers.
PC_DEVICE KeyRange selected_range(const PcAttentionParams& p, const SelectedKeys& keys, const KeyRange& range) {
  const int begin = keys.before(p, range.begin);
  return {begin, max_of(keys.before(p, range.end), begin)};
}

// Keys in numbers that a query at `position` may attend to.
template <bool kSelected>
PC_DEVICE KeyRange keys_in_numbers(const PcAttentionParams& p, const Sequence& sequence, int position) {
  const KeyRange range = attended_keys(p, position, sequence.length);
  if constexpr (kSelected) {
    return selected_range(p, load_selected(p, sequence), range);
  } else {
    return range;
  }
}

// clamp_item() in numbers.
template <typename Options>
PC_DEVICE void clamp_numbers(const PcAttentionParams& p, const Sequence& sequence, PcWorkItem& item) {
  if constexpr (Options::kSelected) {
    clamp_queries(p, item);
    const int first = sequence.position(item.query_begin);
    const KeyRange a = keys_in_numbers<true>(p, sequence, first);
    const KeyRange b = keys_in_numbers<true>(p, sequence, first + item.query_count - 1);
    item.key_begin = clamp(item.key_begin, a.begin, b.end);
    item.key_end = item.query_count == 0 ? item.key_begin : clamp(item.key_end, item.key_begin, b.end);
  } else {
    clamp_item<Options>(p, sequence, item);
  }
}

// The part of a walk or of rows that maps numbers to positions; empty without a selection.
template <bool kSelected>
struct NumberedKeys {
  PC_MEMBER void open(const PcAttentionParams&, const Sequence&) {}
  PC_MEMBER int position(const PcAttentionParams&, int number) const { return number; }
};

template <>
struct NumberedKeys<true> {
  SelectedKeys keys;

  PC_MEMBER void open(const PcAttentionParams& p, const Sequence& sequence) { keys = load_selected(p, sequence); }
  PC_MEMBER int position(const PcAttentionParams& p, int number) const { return keys.position(p, number); }
};

}  // namespace pagecore
