// What prefill.cu works on and what brings it: items, tiles of keys and values, queries.
#pragma once

#include "abi_plan.h"
#include "prefill_shape.h"
#include "splits.cuh"

namespace pagecore {

template <int kDim, typename Options>
struct PrefillTile {
  static constexpr PcPrefillShape kShape = pc_prefill_tiles(kDim, Options::kFull);
  static constexpr int kThreads = kShape.warps * 32;
  static constexpr int kTokens = kShape.tokens;
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kShape.rows();
  static constexpr int kKeys = kTokens / 2;    // that are multiplied at a time: a half of a tile
  static constexpr int kKeyTiles = kKeys / 8;  // of S
  static constexpr int kDimTiles = kDim / 8;   // of O
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kCopyRows = kThreads / kChunks;  // that the block copies at once

  static_assert(kCopyRows % 8 == 0 && kTokens % kCopyRows == 0 && kFoldTokens % kTokens == 0, "");
  static_assert(kTokens <= 64 && kTokens <= kThreads, "");

  // Where chunk c of row r lies, and how an address is moved on: r by a multiple of 8, c by an even number.
  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
  PC_MEMBER static SharedAddress right_of(SharedAddress address, int chunks) {
    return (address ^ ((chunks & 7) << 4)) + ((chunks & ~7) << 4);
  }
};

// An item as it stands in the schedule, fitted to the lengths. Registers are for sums: what the tiles do without is
// read again when they are done.
struct PrefillItem {
  Splits splits;
  PcWorkItem work;
  Sequence sequence;

  PC_MEMBER PrefillItem(const PcAttentionParams& p, int i) {
    work = load_item(p.schedule, i);
    splits = splits_of(work);
    sequence = load_sequence(p, work.sequence);
    fit_item(p, sequence, work);
  }

  PC_MEMBER int num_rows(const Heads& heads) const { return work.query_count * heads.count; }
  PC_MEMBER KeyRange keys() const { return {work.key_begin, work.key_end}; }
};

// What all threads ask of an item, tile by tile.
struct alignas(16) ItemSpan {
  pc_int64 table_row;
  int item;  // of the schedule
  int pad[3];
  KeyRange common;  // keys that all of its queries attend to, or none, as far as causality and the window go
};

static_assert(sizeof(ItemSpan) == 32, "the shape has room for it");

// Brings tiles of keys and values.
template <typename T, int kDim, typename Options>
class PrefillFeed {
  using Tile = PrefillTile<kDim, Options>;

 public:
  PC_MEMBER PrefillFeed(const PcAttentionParams& p, const Shared<pc_uint8>& shared, int kv_head)
      : key_(p.key.data),
        value_(p.value.data),
        shared_(shared),
        slots_((shared + Tile::kShape.slots_begin()).template as<pc_uint64>()),
        span_((shared + Tile::kShape.item_begin()).template as<ItemSpan>()),
        slot_{0, 0} {
    const int column = pc_thread() % Tile::kChunks * 8;
    key_ = key_ + (kv_head * p.key.head_stride + column);
    value_ = value_ + (kv_head * p.value.head_stride + column);
  }

  // A barrier is to follow.
  PC_MEMBER void start(const PcAttentionParams& p, const PrefillItem& item, int i) const {
    KeyRange common = common_keys(p, item.sequence, item.work);
    if (item.work.query_count == 1) common = {0, 0x7fffffff};
    if (pc_thread() == 0) span_.store(0, {item.sequence.table_row, i, {0, 0, 0}, common});
  }

  PC_MEMBER int item() const { return span_.load(0).item; }

  // Whether some queries of the item attend to a key of the tile, and others do not.
  PC_MEMBER bool is_edge(int token) const {
    const KeyRange common = span_.load(0).common;
    return token < common.begin || token + Tile::kTokens > common.end;
  }

  // Looks up the slots of the tile that begins at `token`, a thread each. They are stored for copies later.
  PC_MEMBER void look_up(const PcAttentionParams& p, const KeyRange& keys, int token) {
    const int own = token + pc_thread();
    slot_ = {0, 0};
    if (pc_thread() < Tile::kTokens && keys.has(own)) slot_ = find_slot(p, span_.load(0).table_row, own);
  }

  PC_MEMBER void store_key_slots(const PcAttentionParams& p) const {
    if (pc_thread() < Tile::kTokens) slots_.store(pc_thread(), slot_offset(p.key, slot_));
  }
  PC_MEMBER void store_value_slots(const PcAttentionParams& p) const {
    if (pc_thread() < Tile::kTokens) slots_.store(Tile::kTokens + pc_thread(), slot_offset(p.value, slot_));
  }

  PC_MEMBER void copy_keys(const KeyRange& keys, int token) const {
    copy(key_, Tile::kShape.keys_begin(), keys, token, 0);
    pc_commit_copies();
  }
  PC_MEMBER void copy_values(const KeyRange& keys, int token) const {
    copy(value_, Tile::kShape.values_begin(), keys, token, Tile::kTokens);
    pc_commit_copies();
  }

 private:
  PC_MEMBER void copy(const Global<T>& column, int target, const KeyRange& keys, int token, int first_slot) const {
    const int first_row = pc_thread() / Tile::kChunks;
    const SharedAddress first = shared_.address(target + Tile::at(first_row, pc_thread() % Tile::kChunks));
    PC_UNROLL
    for (int row = 0; row < Tile::kTokens; row += Tile::kCopyRows) {
      const pc_int64 from = static_cast<pc_int64>(slots_.load(first_slot + first_row + row));
      pc_copy_async(first + row * Tile::kRowBytes, column, from, keys.has(token + first_row + row));
    }
  }

  Global<T> key_, value_;  // of the head, at the thread's column
  Shared<pc_uint8> shared_;
  Shared<pc_uint64> slots_;
  Shared<ItemSpan> span_;
  Slot slot_;
};

// Begins to copy an item's queries; those that it does not have are 0.
template <typename T, int kDim, typename Options>
PC_DEVICE void copy_queries(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item,
                            const Shared<pc_uint8>& queries) {
  using Tile = PrefillTile<kDim, Options>;
  const Global<T> query(p.query.data);
  const int chunk = pc_thread() % Tile::kChunks, first_row = pc_thread() / Tile::kChunks;
  for (int row = first_row; row < Tile::kRows; row += Tile::kCopyRows) {
    const bool exists = row < item.num_rows(heads);
    const int query_row = item.work.query_begin + row / heads.count, head = heads.first + row % heads.count;
    const pc_int64 from = exists ? row_offset(p.query, query_row, head) + chunk * 8 : 0;
    pc_copy_async(queries.address(Tile::at(row, chunk)), query, from, exists);
  }
}

// Turns the signs of what copy_queries brought; each thread those that it has copied itself.
template <int kDim, typename Options>
PC_DEVICE void negate_queries(const Shared<pc_uint8>& queries) {
  using Tile = PrefillTile<kDim, Options>;
  const int chunk = pc_thread() % Tile::kChunks;
  for (int row = pc_thread() / Tile::kChunks; row < Tile::kRows; row += Tile::kCopyRows) {
    pc_vector v = queries.load_vector(Tile::at(row, chunk));
    for (int k = 0; k < 4; ++k) v.word[k] ^= 0x80008000u;
    queries.store_vector(Tile::at(row, chunk), v);
  }
}

}  // namespace pagecore
