// The new tokens of a sequence as a tree (PcTree): their positions, and the range of keys of each.
//
//   tree            row of bits     position        keys of the row "d", W = 2
//   a -+- b -- d    a  000001       base            history  ... base - 1     too far
//      +- c -- e    b  000011       base + 1        a  ancestor, distance 2   too far
//                   c  000101       base + 1        b  ancestor, distance 1   attended
//                   d  001011       base + 2        c  another branch         not attended
//                   e  010101       base + 2        d  itself                 attended
//
// A window that leaves out an ancestor leaves out the whole history. The keys of a row are therefore one range of
// slots, of which the mask leaves out other branches.
#pragma once

#include "cuda_src/attention/inputs/options.cuh"
#include "cuda_src/attention/inputs/selected.cuh"

namespace pagecore {

// Word `word` of 32 bits of a token's row; 0 past its end.
PC_DEVICE pc_uint32 load_tree_word(const PcAttentionParams& p, int token, int word) {
  return word < 2 * p.tree.words ? Global<pc_uint32>(p.mask).load(2LL * p.tree.words * token + word) : 0;
}

// A row of bits, in the bytes of a MaskRow.
struct TreeRow {
  int base;   // the key of the sequence's first new token
  int token;  // row of the packed queries

  PC_MEMBER static MaskRow pack(int base, int token) {
    return {static_cast<pc_int64>(token) << 32 | static_cast<pc_int64>(static_cast<pc_uint32>(base))};
  }
  PC_MEMBER explicit TreeRow(const MaskRow& packed)
      : base(static_cast<int>(packed.begin & 0xffffffff)), token(static_cast<int>(packed.begin >> 32)) {}

  // The bits of keys first .. first + 31; those of the history are set.
  PC_MEMBER pc_uint32 bits(const PcAttentionParams& p, int first) const {
    const int from = first - base;
    if (from <= -32) return ~0u;
    if (from < 0) return load_tree_word(p, token, 0) << -from | ((1u << -from) - 1);  // fault: tree_history
    const pc_uint32 low = load_tree_word(p, token, from >> 5), high = load_tree_word(p, token, (from >> 5) + 1);
    return static_cast<pc_uint32>((static_cast<pc_uint64>(high) << 32 | low) >> (from & 31));
  }

  PC_MEMBER bool has(const PcAttentionParams& p, int j) const {
    return j < base || (load_tree_word(p, token, (j - base) >> 5) >> ((j - base) & 31) & 1) != 0;
  }
};

// The position of a row of the packed queries, which is a new token.
PC_DEVICE int tree_position(const PcAttentionParams& p, const Sequence& sequence, int query_row) {
  const int base = sequence.position(sequence.queries_begin);
  pc_int64 position = static_cast<pc_int64>(base) - 1;
  if (p.tree.positions.data != 0) {
    position = begin_index_words(p.tree.positions, query_row).get(p.tree.positions.wide != 0);
  } else {
    for (int word = 0; word < 2 * p.tree.words; ++word) position += pc_count_bits(load_tree_word(p, query_row, word));
  }
  return clamp(position, base, sequence.position(query_row));
}

// The keys, in the order of the slots, from the first to the last that the row attends to.
PC_DEVICE KeyRange tree_keys(const PcAttentionParams& p, const Sequence& sequence, int query_row, int position) {
  const int base = sequence.position(sequence.queries_begin), own = sequence.position(query_row);
  const int earliest = attended_keys(p, position, sequence.length).begin;
  if (earliest <= base) return {earliest, own + 1};
  // Count the ancestors that the window leaves, from the row's own bit down.
  int begin = own, left = position - earliest + 1;
  for (int i = own - base; i >= 0 && left > 0; --i) {
    if ((load_tree_word(p, query_row, i >> 5) >> (i & 31) & 1) == 0) continue;
    begin = base + i;
    --left;  // fault: tree_window
  }
  return {begin, own + 1};
}

}  // namespace pagecore
