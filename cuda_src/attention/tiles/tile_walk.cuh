// The order in which a warp visits the tiles of a worker's items, and the slots of their tokens.
//
// The walk runs a few tiles ahead of the computation and continues across the ends of items, so that copies never wait
// for an item to end.
//
// An item's keys are cut into tiles at multiples of kTokens, and the warps take tiles in turn. Rounds begin at
// multiples of their own length. The warp that processes a key therefore depends neither on the item's first key nor on
// its last.
//
//   keys of the item      [ . . . . . . . . . . . . . . . . . . . . )
//   tiles             |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |
//   warp, of 4            0       1       2       3       0       1       2       3
//   round                 0       0       0       0       1       1       1       1
//
// All warps run the same number of rounds. A warp whose tile has no key of the item idles in that round.
#pragma once

#include "cuda_src/attention/inputs/options.cuh"
#include "cuda_src/attention/inputs/sealed.cuh"
#include "cuda_src/attention/inputs/selected.cuh"
#include "cuda_src/shapes/attention.h"

namespace pagecore {

// The rounds in which kWarps warps process the keys of an item.
template <int kTokens, int kWarps>
struct Rounds {
  static constexpr int kStep = kTokens * kWarps;  // tokens of a round

  PC_MEMBER static int first_token(const PcWorkItem& item) { return item.key_begin / kStep * kStep; }
  PC_MEMBER static int count(const PcWorkItem& item) {
    if (item.key_end <= item.key_begin) return 0;
    return ceil_div(item.key_end, kStep) - item.key_begin / kStep;
  }
};

// State of a walk. It is kept in shared memory between two steps, because registers are scarce.
struct alignas(16) WalkState {
  int next_item;
  int end_item;
  KeyRange keys;  // of the item
  pc_int64 table_row;
  int token;      // first token of the warp's next tile
  int rounds;     // rounds left of the item, including the one of this tile; 0 at the end of the last item
  int first_row;  // items with at most this number of packed rows are skipped
  int heads;      // rows of a query
};

static_assert(sizeof(WalkState) == PcRingShape::kWalkBytes, "the shape has room for it");

// The slot of a lane's token. Its block id is requested one tile before it is used.
template <bool kSelected>
class NextSlot {
 public:
  PC_MEMBER void open(const PcAttentionParams&, const Sequence&) {}
  // Prepares the next request, for `token` if `numbers` has it.
  PC_MEMBER void prepare(const PcAttentionParams&, const KeyRange&, int) {}
  template <typename Tables>
  PC_MEMBER typename Tables::Pending request(const PcAttentionParams& p, const Tables& tables, pc_int64 table_row,
                                             int token) const {
    return tables.begin(p, table_row, token);
  }
};

// Selected keys: the entry with the token's position is requested one tile before the block id.
template <>
class NextSlot<true> {
 public:
  PC_MEMBER void open(const PcAttentionParams& p, const Sequence& sequence) { keys_ = load_selected(p, sequence); }
  PC_MEMBER void prepare(const PcAttentionParams& p, const KeyRange& numbers, int token) {
    entry_ = 0;
    if (numbers.has(token)) entry_ = keys_.entry(p, SelectedKeys::entry_of(p, token));
  }
  template <typename Tables>
  PC_MEMBER typename Tables::Pending request(const PcAttentionParams& p, const Tables& tables, pc_int64 table_row,
                                             int token) const {
    return tables.begin(p, table_row, SelectedKeys::position_in(p, entry_, token));
  }

 private:
  SelectedKeys keys_;
  int entry_;
};

// A tile of an instance, for rings and walks.
template <typename Tile, typename InstanceOptions>
struct TileFor : Tile {
  using Options = InstanceOptions;
};

template <int kTokens, int kWarps, typename Options>
class TileWalk {
  using ItemRounds = Rounds<kTokens, kWarps>;
  using Tables = BlockTables<kReadsSealed<Options>>;

 public:
  PC_MEMBER explicit TileWalk(const Shared<pc_uint8>& memory) : memory_(memory.template as<WalkState>()) {}

  // Moves to the first tile of the first item that has packed rows from `first_row` on. `heads`: rows of a query.
  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, int first_row, int heads) {
    WalkState state;
    state.first_row = first_row;
    state.heads = heads;
    state.next_item = work.first;
    state.end_item = work.end;
    fetch_item(p, state);
    open_item(p, state);
    save(state);
  }

  PC_MEMBER WalkState state() const { return memory_.load(0); }
  // The slot of token state().token + lane. Its block id was requested one step earlier, to hide the latency of the
  // table.
  PC_MEMBER auto slot(const PcAttentionParams& p) const { return slot_.get(p); }
  // Returns false if the table's entry of that token is negative.
  PC_MEMBER bool is_listed() const { return slot_.block.high == 0 && static_cast<int>(slot_.block.low) >= 0; }

  // Moves to the next tile. `state` is the result of state(), which every lane must have called before.
  PC_MEMBER void advance(const PcAttentionParams& p, WalkState state) {
    state.token += ItemRounds::kStep;
    if (--state.rounds == 0) {
      open_item(p, state);
    } else {
      look_up(p, state);
    }
    save(state);
  }

 private:
  PC_MEMBER void save(const WalkState& state) const {
    if (pc_lane() == 0) memory_.store(0, state);
    pc_sync_warp();  // fault: barrier_after_walk
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
      clamp_numbers<Options>(p, sequence, item);
      if (item.query_count * state.heads <= state.first_row) continue;
      state.table_row = sequence.table_row;
      state.keys = {item.key_begin, item.key_end};
      state.rounds = ItemRounds::count(item);
      state.token = ItemRounds::first_token(item) + pc_warp() * kTokens;
      next_.open(p, sequence);
      tables_.open(p, sequence);
      next_.prepare(p, state.keys, state.token + pc_lane());
    }
    look_up(p, state);
  }

  // Prefetches the next item while this one is processed, one word in each lane.
  PC_MEMBER void fetch_item(const PcAttentionParams& p, const WalkState& state) {
    if (state.next_item < state.end_item) {
      item_word_ = Global<pc_int32>(p.schedule.items).load(8LL * state.next_item + pc_lane() % 8);
    }
  }

  PC_MEMBER void look_up(const PcAttentionParams& p, const WalkState& state) {
    const int token = state.token + pc_lane();
    slot_ = {};
    if (state.rounds != 0 && pc_lane() < kTokens && state.keys.has(token)) {
      slot_ = next_.request(p, tables_, state.table_row, token);
    }
    if (state.rounds > 1) next_.prepare(p, state.keys, token + ItemRounds::kStep);
  }

  Shared<WalkState> memory_;
  int item_word_;
  typename Tables::Pending slot_;
  Tables tables_;
  NextSlot<Options::kSelected> next_;
};

}  // namespace pagecore
