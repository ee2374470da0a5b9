// The order in which a warp meets the keys of a worker's items, and where these lie: always a few tiles ahead of what
// is being computed, across the ends of items, so that copies never wait for an item to end.
//
// An item's keys are cut into tiles at multiples of kTokens, and tiles go around the warps:
//
//   keys of the item        [ . . . . . . . . . . . . . . . . . . . . . . . )
//   tiles                |   0   |   1   |   2   |   3   |   4   |   5   |
//   warp, of 4               0       1       2       3       0       1
//   round                    0       0       0       0       1       1
//
// All warps make the same rounds; one whose tile lies behind the keys does nothing in it.
#pragma once

#include "attention_batch.cuh"
#include "attention_shape.h"

namespace pagecore {

PC_DEVICE int first_tile_token(const PcWorkItem& item, int tokens) { return item.key_begin / tokens * tokens; }

PC_DEVICE int count_rounds(const PcWorkItem& item, int tokens, int warps) {
  if (item.key_end <= item.key_begin) return 0;
  return divide_up(item.key_end - first_tile_token(item, tokens), tokens * warps);
}

template <int kTokens, int kWarps>
class TileWalk {
 public:
  // Stands at the first tile of the items, if they have one.
  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work) {
    next_item_ = work.first;
    end_ = work.end;
    if (next_item_ < end_) item_ = load_item(p.schedule, next_item_);
    open_item(p);
  }

  PC_MEMBER bool at_end() const { return rounds_ == 0; }
  PC_MEMBER int first_token() const { return token_; }
  PC_MEMBER const KeyRange& keys() const { return keys_; }
  PC_MEMBER bool is_empty() const { return token_ >= keys_.end; }
  // Of token first_token() + lane; known since the tile before, because the table is not at hand at once.
  PC_MEMBER const Slot& slot() const { return slot_; }

  PC_MEMBER void advance(const PcAttentionParams& p) {
    token_ += kTokens * kWarps;
    if (--rounds_ == 0) {
      open_item(p);
    } else {
      look_up(p);
    }
  }

 private:
  PC_MEMBER void open_item(const PcAttentionParams& p) {
    rounds_ = 0;
    while (rounds_ == 0 && next_item_ < end_) {
      PcWorkItem item = item_;
      if (++next_item_ < end_) item_ = load_item(p.schedule, next_item_);  // on its way while this one is walked
      const Sequence sequence = load_sequence(p, item.sequence);
      fit_item(p, sequence, item);
      table_row_ = sequence.table_row;
      keys_ = {item.key_begin, item.key_end};
      rounds_ = count_rounds(item, kTokens, kWarps);
      token_ = first_tile_token(item, kTokens) + pc_warp() * kTokens;
    }
    look_up(p);
  }

  PC_MEMBER void look_up(const PcAttentionParams& p) {
    const int token = token_ + pc_lane();
    slot_ = {0, 0};
    if (rounds_ != 0 && pc_lane() < kTokens && keys_.has(token)) slot_ = find_slot(p, table_row_, token);
  }

  PcWorkItem item_;  // the next one
  int next_item_;
  int end_;
  KeyRange keys_;
  pc_int64 table_row_;
  int token_;
  int rounds_;  // that are left of this item, this one included
  Slot slot_;
};

}  // namespace pagecore
