// The order in which a warp meets the keys of a worker's items, and where these lie: always a few tiles ahead of what
// is being computed, across the ends of items, so that copies never wait for an item to end.
//
// An item's keys are cut into tiles at multiples of kTokens, and tiles go around the warps. Rounds
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

// How kWarps warps go through an item's keys.
template <int kTokens, int kWarps>
struct Rounds {
  static constexpr int kStep = kTokens * kWarps;  // tokens of a round

  PC_MEMBER static int first_token(const PcWorkItem& item) { return item.key_begin / kStep * kStep; }
  PC_MEMBER static int count(const PcWorkItem& item) {
    if (item.key_end <= item.key_begin) return 0;
    return divide_up(item.key_end, kStep) - item.key_begin / kStep;
  }
};

// Where a walk stands. Registers are for sums: between two steps it is kept in shared memory.
struct alignas(16) WalkState {
  int next_item;
  int end_item;
  KeyRange keys;  // of the item
  pc_int64 table_row;
  int token;      // first of the warp's next tile
  int rounds;     // that are left of the item, this tile's included; 0: there are no more items
  int first_row;  // items of no more packed rows than that are passed over
  int heads;      // rows of a query
};

static_assert(sizeof(WalkState) == PcRingShape::kWalkBytes, "the shape has room for it");

template <int kTokens, int kWarps>
class TileWalk {
  using ItemRounds = Rounds<kTokens, kWarps>;

 public:
  PC_MEMBER explicit TileWalk(const Shared<pc_uint8>& place) : place_(place.template as<WalkState>()) {}

  // Stands at the first tile of those of the items that have packed rows from `first_row` on; `heads` a query.
  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, int first_row, int heads) {
    WalkState state;
    state.first_row = first_row;
    state.heads = heads;
    state.next_item = work.first;
    state.end_item = work.end;
    fetch_item(p, state);
    open_item(p, state);
    keep(state);
  }

  PC_MEMBER WalkState state() const { return place_.load(0); }
  // Of token state().token + lane; looked up a step ago, because the table is not at hand at once.
  PC_MEMBER Slot slot(const PcAttentionParams& p) const { return slot_.arrived(p); }

  // To the next tile. `state` is what state() gave; all lanes are past that.
  PC_MEMBER void advance(const PcAttentionParams& p, WalkState state) {
    state.token += ItemRounds::kStep;
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
      if (item.query_count * state.heads <= state.first_row) continue;
      state.table_row = sequence.table_row;
      state.keys = {item.key_begin, item.key_end};
      state.rounds = ItemRounds::count(item);
      state.token = ItemRounds::first_token(item) + pc_warp() * kTokens;
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
    slot_ = {{0, 0}, 0};
    if (state.rounds != 0 && pc_lane() < kTokens && state.keys.has(token)) {
      slot_ = begin_slot(p, state.table_row, token);
    }
  }

  Shared<WalkState> place_;
  int item_word_;
  SlotOnItsWay slot_;
};

}  // namespace pagecore
