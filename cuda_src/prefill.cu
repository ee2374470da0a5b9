// Attention of many queries: 16-bit caches, head dims 64, 128 and 256.
//
// A CTA is one worker of the schedule for one key head. Its items have up to 128 packed rows, query * heads + head, so
// that a tile of keys and values is read once for all query heads that share it. Every warp has rows of its own and
// meets all keys:
//
//                64 keys of a tile (head_dim 256: 32)
//              +--------------------------+
//   warp 0     |                          |   Q   shared memory, ldmatrix
//   warp 1     |  S = Q K^T               |   K   shared memory, ldmatrix; what a warp loads serves all of its rows
//   warp 2     |                          |   S   registers, weights are repacked as left operand
//   warp 3     +--------------------------+
//                head_dim
//              +--------------------------+   V   shared memory, ldmatrix transposed
//   warp ...   |  O += P V                |   O   registers
//              +--------------------------+
//
// A warp has 32 rows, so that each fragment of K and V is multiplied twice, and 16 where the registers hold no more:
// head_dim 256, and scores that are changed (Full).
//
// Copies: one tile of keys and one of values. The values are on their way while their keys are multiplied, the next
// keys while the values are; the other CTA of the multiprocessor fills what gaps are left. Slots are looked up in the
// table two tiles ahead. Keys that no row of the item attends to are not read, zeros stand in their place.
//
// Sums that do not depend on the batch: keys come in pieces of p.fold_tokens, each summed by itself. The last one of a
// split tile's pieces joins them all; of a tile that is not split the pieces are folded into rows that the worker has
// for itself behind the partial rows of splits, by the same steps.
//
// Shared memory: a row of 2 * head_dim bytes has its 16-byte chunks permuted, chunk c of row r at c ^ (r % 8).
//
// Bytes: queries once, keys and values once for each 128 rows (mostly from the second-level cache), output once.

#include "abi_plan.h"
#include "prefill_shape.h"
#include "splits.cuh"
#include "values.cuh"

namespace pagecore {

template <int kDim, typename Options>
struct PrefillTile {
  static constexpr PcPrefillShape kShape = pc_prefill_tiles(kDim, Options::kFull);
  static constexpr int kThreads = kShape.warps * 32;
  static constexpr int kTokens = kShape.tokens;
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kShape.rows();
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

// What a warp asks of its rows.
struct alignas(16) WarpSpan {
  KeyRange any;  // keys that one of them attends to
  KeyRange common;
};

static_assert(sizeof(ItemSpan) == 32 && sizeof(WarpSpan) == 16, "the shape has room for them");

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

// What a warp has of an item: its rows, and their sums.
template <typename T, int kDim, typename Options>
class PrefillRows {
  using Tile = PrefillTile<kDim, Options>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kKeyTiles = Tile::kTokens / 16;  // of half a tile
  static constexpr int kDimTiles = kDim / 8;

 public:
  PC_MEMBER PrefillRows(const Shared<pc_uint8>& shared, const ScoreRule& rule)
      : shared_(shared),
        ranges_((shared + Tile::kShape.ranges_begin()).template as<KeyRange>()),
        folded_((shared + Tile::kShape.sums_begin()).template as<float>()),
        span_((shared + (Tile::kShape.spans_begin() + pc_warp() * 16)).template as<WarpSpan>()),
        rule_(rule) {}

  PC_MEMBER void start(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    const int first = pc_warp() * Tile::kWarpRows, num_rows = item.num_rows(heads);
    const int last = min_of(first + Tile::kWarpRows, num_rows) - 1;
    WarpSpan span = {{0, 0}, {0, 0}};
    if (first <= last) {
      const int a = item.sequence.position(item.work.query_begin + first / heads.count);
      const int b = item.sequence.position(item.work.query_begin + last / heads.count);
      const KeyRange early = keys_of(p, item.sequence, item.work, a);
      const KeyRange late = keys_of(p, item.sequence, item.work, b);
      span = {{early.begin, late.end}, {late.begin, early.end}};
    }
    if (pc_lane() == 0) span_.store(0, span);
    if (Options::kFull) {
      rows_[0] = load_row(p, heads, item, first + pc_lane() / 4);
      rows_[1] = load_row(p, heads, item, first + pc_lane() / 4 + 8);
    } else if (pc_lane() < Tile::kWarpRows) {
      ranges_.store(first + pc_lane(), load_row(p, heads, item, first + pc_lane()).keys);
    }
    clear();
  }

  // Of nothing yet.
  PC_MEMBER void clear() {
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      softmax_[m].clear();
      PC_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) o_[m][n][i] = 0.0f;
      }
    }
  }

  // Keys are met by halves of a tile. A half begins at `token`, and in its tile at `key`.
  static constexpr int kKeys = Tile::kTokens / 2;

  // Whether any of the warp's rows attends to a key of the half.
  PC_MEMBER bool attends_to(int token) const {
    const KeyRange any = span_.load(0).any;
    return token < any.end && token + kKeys > any.begin;
  }

  // S of the half.
  PC_MEMBER void multiply_keys(int key) {
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      PC_UNROLL
      for (int n = 0; n < kKeyTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) s_[m][n][i] = 0.0f;
      }
    }
    // Matrices: of queries rows 0-7 and 8-15, for two chunks of 8 dims; of keys two chunks, for 0-7 and 8-15.
    const SharedAddress first_query =
        shared_.address(Tile::at(pc_warp() * Tile::kWarpRows + pc_lane() % 16, pc_lane() / 16));
    const SharedAddress first_key = shared_.address(
        Tile::kShape.keys_begin() + Tile::at(key + pc_lane() % 8 + pc_lane() / 16 * 8, pc_lane() / 8 % 2));
    PC_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      pc_uint32 q[kRowTiles][4];
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        pc_load_matrices(q[m], Tile::right_of(first_query, 2 * k) + 16 * m * Tile::kRowBytes);
      }
      PC_UNROLL
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        pc_uint32 b[4];
        pc_load_matrices(b, Tile::right_of(first_key, 2 * k) + 16 * n * Tile::kRowBytes);
        PC_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          pc_multiply<T>(s_[m][2 * n], q[m], b[0], b[1]);
          pc_multiply<T>(s_[m][2 * n + 1], q[m], b[2], b[3]);
        }
      }
    }
  }

  // S becomes weights, and O counts from the largest score since.
  PC_MEMBER void weigh_keys(const PcAttentionParams& p, int token) {
    const KeyRange common = span_.load(0).common;
    const bool edge = token < common.begin || token + kKeys > common.end;
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      if (Options::kFull || edge) change_row_tile(p, m, token, edge);
      float keep[2];
      add_to_softmax(rule_.factor, softmax_[m], s_[m], keep);
      PC_UNROLL
      for (int k = 0; k < kKeyTiles / 2; ++k) pack_weights<T>(s_[m][2 * k], s_[m][2 * k + 1], weights_[m][k]);
      // Mostly there is no larger score than those before.
      if (pc_ballot(keep[0] != 1.0f || keep[1] != 1.0f) == 0) continue;
      PC_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) o_[m][n][i] *= keep[i / 2];
      }
    }
  }

  PC_MEMBER void add_values(int key) {
    // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
    const SharedAddress first =
        shared_.address(Tile::kShape.values_begin() + Tile::at(key + pc_lane() % 16, pc_lane() / 16));
    PC_UNROLL
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      PC_UNROLL
      for (int n = 0; n < kDimTiles / 2; ++n) {
        pc_uint32 b[4];
        pc_load_matrices_transposed(b, Tile::right_of(first, 2 * n) + 16 * k * Tile::kRowBytes);
        PC_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          pc_multiply<T>(o_[m][2 * n], weights_[m][k], b[0], b[1]);
          pc_multiply<T>(o_[m][2 * n + 1], weights_[m][k], b[2], b[3]);
        }
      }
    }
  }

  // What keys with infinite or NaN values give to the rows that attend to them: bit t of `found` is key t of the half.
  // Rows that do not attend to one have a weight of 0.
  PC_MEMBER void add_by_hand(pc_uint32 found, int key) {
    for (int t = 0; found != 0; ++t, found >>= 1) {
      if ((found & 1) == 0) continue;
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        PC_UNROLL
        for (int r = 0; r < 2; ++r) add_key_by_hand(weight_of(m, r, t), key + t, m, r);
      }
    }
  }

  // The keys of a whole item have been seen: to the output.
  PC_MEMBER void store_whole(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    const float value_scale = load_number(p.value_scale, heads.kv, 1.0f);
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(softmax_[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Place place = place_of(heads, item, m, r);
        const float sink = place.exists ? load_sink(p, place.head) : -pc_infinity();
        const RowEnd end = end_row(softmax_[m].top[r] * rule_.factor, softmax_[m].sum[r], sink);
        if (place.exists && pc_lane() % 4 == 0) store_lse(p, place.query_row, place.head, end.lse);
        scale_row(m, r, end.factor * value_scale);
        gather_row(m, r);
      }
    }
    store_rows(p, heads, item);
  }

  // The keys of a split have been seen: to its partial rows.
  PC_MEMBER void store_part(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    const Global<pc_uint64> partial(p.partial_out);
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(softmax_[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Place place = place_of(heads, item, m, r);
        if (!place.exists) continue;
        const RowEnd end = end_row(softmax_[m].top[r] * rule_.factor, softmax_[m].sum[r], -pc_infinity());
        scale_row(m, r, end.factor);
        const pc_int64 row = item.splits.row(place.query);
        if (pc_lane() % 4 == 0) store_partial_lse(p, row, place.head, end.lse);
        store_row(partial, partial_offset(p, row, place.head), m, r);
      }
    }
  }

  // A piece of a tile that is not split has been seen: it joins those before it, in the partial rows that the worker
  // has for itself, and the last of them goes to the output.
  PC_MEMBER void fold(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, bool is_first,
                      bool is_last) {
    const int tile_queries = max_of(Tile::kRows / (p.num_query_heads / p.num_kv_heads), 1);
    const pc_int64 own = p.num_partial_rows - (pc_num_blocks_x() - pc_block_x()) * tile_queries;
    const float value_scale = load_number(p.value_scale, heads.kv, 1.0f);
    const Global<pc_uint64> partial(p.partial_out);
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(softmax_[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Place place = place_of(heads, item, m, r);
        const pc_int64 to = partial_offset(p, own + place.query, place.head);
        const RowEnd piece = end_row(softmax_[m].top[r] * rule_.factor, softmax_[m].sum[r], -pc_infinity());
        JoinedRow<2> row;
        row.clear();
        if (!is_first) {
          row.top = folded_.load(2 * place.row);
          row.sum = folded_.load(2 * place.row + 1);
        }
        pc_sync_warp();
        const float top = row.top, sum = row.sum;
        PC_UNROLL
        for (int n = 0; n < kDimTiles; ++n) {
          const float part[2] = {o_[m][n][2 * r] * piece.factor, o_[m][n][2 * r + 1] * piece.factor};
          row.top = top;
          row.sum = sum;
          row.x[0] = row.x[1] = 0.0f;
          if (!is_first && place.exists) {
            const pc_uint64 pair = partial.load(to / 2 + 4 * n + pc_lane() % 4);
            row.x[0] = pc_bits_to_float(static_cast<pc_uint32>(pair));
            row.x[1] = pc_bits_to_float(static_cast<pc_uint32>(pair >> 32));
          }
          row.add(piece.lse, part);
          o_[m][n][2 * r] = row.x[0];
          o_[m][n][2 * r + 1] = row.x[1];
        }
        if (is_last) {
          const RowEnd end = row.end(place.exists ? load_sink(p, place.head) : -pc_infinity());
          if (place.exists && pc_lane() % 4 == 0) store_lse(p, place.query_row, place.head, end.lse);
          scale_row(m, r, end.factor * value_scale);
          gather_row(m, r);
          continue;
        }
        if (pc_lane() % 4 == 0) {
          folded_.store(2 * place.row, row.top);
          folded_.store(2 * place.row + 1, row.sum);
        }
        if (place.exists) store_row(partial, to, m, r);
      }
    }
    if (is_last) {
      store_rows(p, heads, item);
    } else {
      pc_sync_warp();
      clear();
    }
  }

 private:
  // Where row r of row tile m, of the two that a lane has, stands.
  struct Place {
    int row;  // of the item
    int query;
    int query_row;
    int head;
    bool exists;
  };

  PC_MEMBER static Place place_of(const Heads& heads, const PrefillItem& item, int m, int r) {
    const int row = pc_warp() * Tile::kWarpRows + 16 * m + 8 * r + pc_lane() / 4;
    const int query = row / heads.count;
    return {row, query, item.work.query_begin + query, heads.first + row % heads.count, row < item.num_rows(heads)};
  }

  PC_MEMBER static ScoreRow load_row(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, int row) {
    return load_score_row<Options>(p, item.sequence, item.work, item.work.query_begin + row / heads.count,
                                   heads.first + row % heads.count, row < item.num_rows(heads));
  }

  PC_MEMBER static pc_int64 partial_offset(const PcAttentionParams& p, pc_int64 row, int head) {
    return (row * p.num_query_heads + head) * kDim;
  }

  PC_MEMBER void change_row_tile(const PcAttentionParams& p, int m, int token, bool edge) {
    const int first_key = token + 2 * (pc_lane() % 4);
    if constexpr (!Options::kFull) {
      const int row = pc_warp() * Tile::kWarpRows + 16 * m + pc_lane() / 4;
      ScoreRow rows[2];
      rows[0].keys = ranges_.load(row);
      rows[1].keys = ranges_.load(row + 8);
      change_scores<Options>(p, rule_, rows, first_key, edge, s_[m]);
    } else {
      change_scores<Options>(p, rule_, rows_, first_key, edge, s_[m]);
    }
  }

  // Of key t of the half and row r of row tile m, of the two that the lane has.
  PC_MEMBER float weight_of(int m, int r, int t) const {
    pc_uint32 pair = 0;  // all but one are masked: registers have no index, and memory would be used for one
    PC_UNROLL
    for (int i = 0; i < kKeyTiles; ++i) pair |= weights_[m][i / 2][2 * (i % 2) + r] & (i == t / 8 ? 0xffffffffu : 0u);
    pair = static_cast<pc_uint32>(pc_shuffle(static_cast<int>(pair), pc_lane() / 4 * 4 + t % 8 / 2));
    return t % 2 == 0 ? low_of<T>(pair) : high_of<T>(pair);
  }

  PC_MEMBER void add_key_by_hand(float weight, int key, int m, int r) {
    if (weight == 0.0f) return;
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const int at = Tile::kShape.values_begin() + Tile::at(key, n);
      const pc_uint32 pair = shared_.template as<pc_uint32>().load(at / 4 + pc_lane() % 4);
      o_[m][n][2 * r] = pc_fma(weight, low_of<T>(pair), o_[m][n][2 * r]);
      o_[m][n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o_[m][n][2 * r + 1]);
    }
  }

  PC_MEMBER void scale_row(int m, int r, float factor) {
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      o_[m][n][2 * r] *= factor;
      o_[m][n][2 * r + 1] *= factor;
    }
  }

  PC_MEMBER void store_row(const Global<pc_uint64>& target, pc_int64 offset, int m, int r) const {
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const pc_uint64 low = pc_float_to_bits(o_[m][n][2 * r]), high = pc_float_to_bits(o_[m][n][2 * r + 1]);
      target.store(offset / 2 + 4 * n + pc_lane() % 4, low | high << 32);
    }
  }

  // Output is gathered in the place of the warp's queries, which nobody needs any more.
  PC_MEMBER void gather_row(int m, int r) const {
    const int row = pc_warp() * Tile::kWarpRows + 16 * m + 8 * r + pc_lane() / 4;
    const int first = pc_opaque(Tile::at(row, 0) + pc_lane() % 4 * 4);
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const pc_uint32 pair = pc_pack<T>(o_[m][n][2 * r], o_[m][n][2 * r + 1]);
      const int to = (first ^ ((n & 7) << 4)) + ((n & ~7) << 4);  // at(row, n) + ...
      shared_.template as<pc_uint32>().store(to / 4, pair);
    }
  }

  PC_MEMBER void store_rows(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) const {
    pc_sync_warp();
    const Global<T> out(p.out.data);
    const int end = min_of(Tile::kWarpRows, item.num_rows(heads) - pc_warp() * Tile::kWarpRows);
    for (int i = pc_lane(); i < end * Tile::kChunks; i += 32) {
      const int row = pc_warp() * Tile::kWarpRows + i / Tile::kChunks, chunk = i % Tile::kChunks;
      const pc_int64 to = row_offset(p.out, item.work.query_begin + row / heads.count, heads.first + row % heads.count);
      out.store_vector(to + chunk * 8, shared_.load_vector(Tile::at(row, chunk)));
    }
  }

  Shared<pc_uint8> shared_;
  Shared<KeyRange> ranges_;
  Shared<float> folded_;
  Shared<WarpSpan> span_;
  ScoreRule rule_;
  ScoreRow rows_[2];
  Softmax softmax_[kRowTiles];
  float s_[kRowTiles][kKeyTiles][4];
  pc_uint32 weights_[kRowTiles][kKeyTiles / 2][4];
  float o_[kRowTiles][kDimTiles][4];
};

// A bit for each key of the tile that has a value which is infinite or NaN; each warp looks at some of the keys.
template <typename T, int kDim, typename Options>
PC_DEVICE pc_uint64 find_not_finite(const Shared<pc_uint8>& shared) {
  using Tile = PrefillTile<kDim, Options>;
  constexpr int kOwn = Tile::kTokens / Tile::kShape.warps;
  const Shared<pc_uint8> values = shared + (Tile::kShape.values_begin() + pc_warp() * kOwn * Tile::kRowBytes);
  const Shared<int> words = (shared + Tile::kShape.words_begin()).template as<int>();
  int found = 0;
  for (int i = pc_lane(); i < kOwn * Tile::kChunks; i += 32) {
    const pc_vector v = values.load_vector(16 * i);
    for (int k = 0; k < 4; ++k) {
      if (is_not_finite<T>(v.word[k])) found |= 1 << i / Tile::kChunks;
    }
  }
  found = or_of_warp(found);
  if (pc_lane() == 0) words.store(pc_warp(), found);
  pc_sync_block();
  pc_uint64 all = 0;
  for (int w = 0; w < Tile::kShape.warps; ++w) all |= static_cast<pc_uint64>(words.load(w)) << w * kOwn;
  pc_sync_block();
  return all;
}

// Zeros in place of the values of some keys: bit t of `found` is key first + t of the tile.
template <int kDim, typename Options>
PC_DEVICE void clear_values(const Shared<pc_uint8>& shared, pc_uint32 found, int first) {
  using Tile = PrefillTile<kDim, Options>;
  for (int i = pc_thread(); i < Tile::kTokens / 2 * Tile::kChunks; i += Tile::kThreads) {
    if ((found >> i / Tile::kChunks & 1) == 0) continue;
    shared.store_vector(Tile::kShape.values_begin() + first * Tile::kRowBytes + 16 * i, {{0, 0, 0, 0}});
  }
}

// The tiles of item i, and its rows. All threads meet before it.
template <typename T, int kDim, typename Options>
PC_DEVICE void run_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<pc_uint8>& shared) {
  using Tile = PrefillTile<kDim, Options>;
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  PrefillFeed<T, kDim, Options> feed(p, shared, heads.kv);
  PrefillRows<T, kDim, Options> rows(shared, rule);
  KeyRange keys;
  {
    const PrefillItem item(p, i);
    keys = item.keys();
    copy_queries<T, kDim, Options>(p, heads, item, shared);
    feed.start(p, item, i);
    rows.start(p, heads, item);
  }
  pc_sync_block();
  int token = keys.begin / Tile::kTokens * Tile::kTokens;
  feed.look_up(p, keys, token);
  feed.store_key_slots(p);
  feed.store_value_slots(p);
  pc_sync_block();
  feed.copy_keys(keys, token);
  feed.look_up(p, keys, token + Tile::kTokens);
  if (rule.negate) {
    pc_wait_copies<0>();
    negate_queries<kDim, Options>(shared);
  }

  for (; token < keys.end; token += Tile::kTokens) {
    pc_wait_copies<0>();
    pc_sync_block();  // the keys are there, and nobody needs the values before
    feed.copy_values(keys, token);
    feed.store_key_slots(p);
    const bool attends[2] = {rows.attends_to(token), rows.attends_to(token + rows.kKeys)};
    if (attends[0]) {
      rows.multiply_keys(0);
      rows.weigh_keys(p, token);
    }
    if (attends[1]) rows.multiply_keys(rows.kKeys);
    pc_wait_copies<0>();
    pc_sync_block();  // the values are there, and nobody needs the keys
    if (token + Tile::kTokens < keys.end) feed.copy_keys(keys, token + Tile::kTokens);
    feed.store_value_slots(p);
    feed.look_up(p, keys, token + 2 * Tile::kTokens);

    pc_uint64 found = 0;
    if (feed.is_edge(token) || (Options::kFull && p.mask != 0)) found = find_not_finite<T, kDim, Options>(shared);
    PC_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && attends[1]) rows.weigh_keys(p, token + rows.kKeys);
      if (found != 0) {
        const pc_uint32 own = static_cast<pc_uint32>(found >> half * rows.kKeys) & (0xffffffffu >> (32 - rows.kKeys));
        if (attends[half]) rows.add_by_hand(own, half * rows.kKeys);
        pc_sync_block();
        clear_values<kDim, Options>(shared, own, half * rows.kKeys);
        pc_sync_block();
      }
      if (attends[half]) rows.add_values(half * rows.kKeys);
    }
    // Items of split tiles end there.
    const int next = token + Tile::kTokens;
    if (p.fold_tokens != 0 && next % p.fold_tokens == 0 && next < keys.end) {
      rows.fold(p, heads, PrefillItem(p, feed.item()), token / p.fold_tokens == keys.begin / p.fold_tokens, false);
    }
  }
  pc_wait_copies<0>();
  pc_sync_block();  // also where there was no tile, nobody needs the queries

  const PrefillItem item(p, feed.item());
  if (item.splits.count > 1) {
    rows.store_part(p, heads, item);
  } else if (p.fold_tokens != 0) {
    const int last = max_of(keys.end - 1, keys.begin);
    rows.fold(p, heads, item, last / p.fold_tokens == keys.begin / p.fold_tokens, true);
  } else {
    rows.store_whole(p, heads, item);
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<int>& flag) {
  const PrefillItem item(p, i);
  if (item.splits.count > 1 && is_last_part(p, item.splits, flag)) {
    join_splits<4>(p, heads, item.work, item.splits);
  }
}

template <typename T, int kDim, typename Options>
PC_KERNEL(pc_prefill_shape(kDim, Options::kFull).threads, pc_prefill_shape(kDim, Options::kFull).blocks_per_sm)
void prefill(const PcAttentionParams p) {
  using Tile = PrefillTile<kDim, Options>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const Shared<ItemSpan> span = (shared + Tile::kShape.item_begin()).template as<ItemSpan>();
  int next = load_work(p.schedule, pc_block_x()).first;
  while (next < load_work(p.schedule, pc_block_x()).end) {
    run_item<T, kDim, Options>(p, heads, next, shared);
    join_item(p, heads, span.load(0).item, (shared + Tile::kShape.words_begin()).template as<int>());
    next = span.load(0).item + 1;
    pc_sync_block();
  }
  clear_padding(p, heads, first_padding_row(p));
}

}  // namespace pagecore
