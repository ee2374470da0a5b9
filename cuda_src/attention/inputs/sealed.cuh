// Sealed blocks (PcSealedAttentionParams): how many tokens of a sequence they have, and the slots of these tokens.
//
//   positions       0 ............ length - 1 | length ......
//   block id from   sealed table              | table of the caches
//
// Lengths and ids are not validated, as in batch.cuh: a length is clamped to what the row of the sealed table and the
// sequence hold, and rounded down to whole blocks.
#pragma once

#include "cuda_src/abi/sealed.h"
#include "cuda_src/attention/inputs/batch.cuh"

namespace pagecore {

// Options of the instances over sealed blocks.
template <typename Base>
struct OverSealed : Base {};
template <typename Options>
constexpr bool kReadsSealed = false;
template <typename Base>
constexpr bool kReadsSealed<OverSealed<Base>> = true;

// The parameters of a kernel over sealed blocks, from their first member, which is what the parts of attention take.
PC_DEVICE const PcSealedAttentionParams& sealed_params(const PcAttentionParams& p) {
  return reinterpret_cast<const PcSealedAttentionParams&>(p);
}

// The slot of a token in a sealed block, or in the caches.
struct SealedSlot {
  int block;
  int offset;  // token in the block
  bool is_sealed;
};

// A slot whose block id is being loaded from one of the tables.
struct PendingSealedSlot {
  PendingIndex block;
  int offset;
  bool is_sealed;

  PC_MEMBER SealedSlot get(const PcAttentionParams& p) const {
    const int num_blocks = is_sealed ? sealed_params(p).num_blocks : p.num_blocks;
    const bool exists = block.high == 0 && block.low < static_cast<pc_uint32>(num_blocks);
    return {exists ? static_cast<int>(block.low) : 0, offset, is_sealed};  // fault: sealed_blocks_outside
  }
};

// The tables of a sequence: where the block id of a token is. Without sealed blocks, in the table of the caches.
template <bool kSealed>
class BlockTables {
 public:
  using Pending = PendingSlot;

  PC_MEMBER void open(const PcAttentionParams&, const Sequence&) {}
  PC_MEMBER Pending begin(const PcAttentionParams& p, pc_int64 table_row, int token) const {
    return begin_slot(p, table_row, token);
  }
};

template <>
class BlockTables<true> {
 public:
  using Pending = PendingSealedSlot;

  PC_MEMBER void open(const PcAttentionParams& p, const Sequence& sequence) {
    const PcSealedAttentionParams& sealed = sealed_params(p);
    const pc_int64 row =
        p.rows.data != 0 ? begin_index_words(p.rows, sequence.index).get(p.rows.wide != 0) : sequence.index;
    const bool exists = row >= 0 && row < sealed.table.num_rows && sealed.num_blocks > 0;
    const pc_int64 given = begin_index_words(sealed.lens, sequence.index).get(sealed.lens.wide != 0);
    const pc_int64 room = static_cast<pc_int64>(sealed.table.width) * p.block_size;
    const int most = clamp(room, 0, sequence.length);
    row_ = exists ? row * sealed.table.row_stride : 0;
    length_ = exists ? clamp(given, 0, most) / p.block_size * p.block_size : 0;  // fault: sealed_lengths
  }

  PC_MEMBER Pending begin(const PcAttentionParams& p, pc_int64 table_row, int token) const {
    if (token >= length_) {
      const PendingSlot slot = begin_slot(p, table_row, token);
      return {slot.block, slot.offset, false};
    }
    const PcTable& table = sealed_params(p).table;
    const int i = p.block_shift >= 0 ? token >> p.block_shift : token / p.block_size;
    return {begin_index_words(table.data, row_ + i, table.wide != 0), token - i * p.block_size, true};
  }

  // Tokens of the sequence in sealed blocks.
  PC_MEMBER int length() const { return length_; }

 private:
  pc_int64 row_;  // element of the sealed table with the first block of the sequence
  int length_;
};

}  // namespace pagecore
