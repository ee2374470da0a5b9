// The order in which a warp meets the keys of a worker's items, and where these lie: always a few tiles ahead of what
// is being computed, across the ends of items, so that copies never wait for an item to end.
//
// An item's keys are cut into tiles at multiples of kTokens, and tiles go around the warps that share its rows. Rounds
// begin at multiples of their own length, so that which warp has a key depends on neither the item's first key nor its
// last.
//
//   keys of the item      [ . . . . . . . . . . . . . . . . . . . . )
//   tiles             |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |
//   warp, of 4            0       1       2       3       0       1       2       3
//   round                 0       0       0       0       1       1       1       1
//
// All warps make the same rounds; one whose tile has no key of the item does nothing in it.
#pragma once

#include "attention_batch.cuh"
#include "attention_shape.h"

namespace pagecore {

// The warps that share the keys of an item's rows, and this one's place among them.
struct Sharing {
  int warps;
  int place;

  // Tokens of a round.
  PC_MEMBER int step(int tokens) const { return warps * tokens; }
  PC_MEMBER int first_token(const PcWorkItem& item, int tokens) const {
    return item.key_begin / step(tokens) * step(tokens) + place * tokens;
  }
  PC_MEMBER int rounds(const PcWorkItem& item, int tokens) const {
    if (item.key_end <= item.key_begin) return 0;
    return divide_up(item.key_end, step(tokens)) - item.key_begin / step(tokens);
  }
};

// Where a walk stands. Registers are for sums: between two steps it is kept in shared memory.
struct alignas(16) WalkState {
  int next_item;
  int end_item;
  KeyRange keys;  // of the item
  pc_int64 table_row;
  int token;   // first of the warp's next tile
  int rounds;  // that are left of the item, this tile's included; 0: there are no more items
  int step;    // from one tile of the warp to the next
};

static_assert(sizeof(WalkState) == PcRingShape::kWalkBytes, "the shape has room for it");

// `Warps::sharing(item)` tells how an item's keys are shared; of no warps: they are not wanted.
template <int kTokens, typename Warps>
class TileWalk {
 public:
  PC_MEMBER TileWalk(const Shared<pc_uint8>& place, const Warps& warps)
      : place_(place.template as<WalkState>()), warps_(warps) {}

  // Stands at the first tile of these items, if they have one.
  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work) {
    WalkState state;
    state.next_item = work.first;
    state.end_item = work.end;
    fetch_item(p, state);
    open_item(p, state);
    keep(state);
  }

  PC_MEMBER WalkState state() const { return place_.load(0); }
  // Of token state().token + lane; looked up a step ago, because the table is not at hand at once.
  PC_MEMBER const Slot& slot() const { return slot_; }

  // To the next tile. `state` is what state() gave; all lanes are past that.
  PC_MEMBER void advance(const PcAttentionParams& p, WalkState state) {
    state.token += state.step;
    if (--state.rounds == 0) {
      open_item(p, state);
    } else {
      look_up(p, state);
    }
    keep(state);
  }

 private:
  PC_MEMBER void keep(const WalkState& state) const {
    if (pc_lane() == 0) place_.store(0, state);
    pc_sync_warp();
  }

  PC_MEMBER void open_item(const PcAttentionParams& p, WalkState& state) {
    state.rounds = 0;
    while (state.rounds == 0 && state.next_item < state.end_item) {
      PcWorkItem item = {pc_shuffle(item_word_, 0),
                         pc_shuffle(item_word_, 1),
                         pc_shuffle(item_word_, 2),
                         pc_shuffle(item_word_, 3),
                         pc_shuffle(item_word_, 4),
                         -1,
                         0,
                         1};
      ++state.next_item;
      fetch_item(p, state);
      const Sequence sequence = load_sequence(p, item.sequence);
      fit_item(p, sequence, item);
      state.table_row = sequence.table_row;
      state.keys = {item.key_begin, item.key_end};
      const Sharing sharing = warps_.sharing(item);
      if (sharing.warps == 0) continue;
      state.rounds = sharing.rounds(item, kTokens);
      state.token = sharing.first_token(item, kTokens);
      state.step = sharing.step(kTokens);
    }
    look_up(p, state);
  }

  // Each lane has a word of the next item, on its way while this one is walked.
  PC_MEMBER void fetch_item(const PcAttentionParams& p, const WalkState& state) {
    if (state.next_item < state.end_item) {
      item_word_ = Global<pc_int32>(p.schedule.items).load(8LL * state.next_item + pc_lane() % 8);
    }
  }

  PC_MEMBER void look_up(const PcAttentionParams& p, const WalkState& state) {
    const int token = state.token + pc_lane();
    if (state.rounds != 0 && pc_lane() < kTokens && state.keys.has(token)) {
      slot_ = find_slot(p, state.table_row, token);
    } else {
      slot_ = {0, 0};
    }
  }

  Shared<WalkState> place_;
  Warps warps_;
  int item_word_;
  Slot slot_;
};

}  // namespace pagecore
