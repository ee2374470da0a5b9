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

// An item as the block works on it.
struct PrefillItem {
  Sequence sequence;
  int query_begin;
  int query_count;
  KeyRange keys;
  KeyRange common;  // that all of its queries attend to, as far as causality and the window go

  PC_MEMBER int num_rows(const Heads& heads) const { return query_count * heads.count; }
};

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
        slot_{0, 0} {
    const int column = pc_thread() % Tile::kChunks * 8;
    key_ = key_ + (kv_head * p.key.head_stride + column);
    value_ = value_ + (kv_head * p.value.head_stride + column);
  }

  // Looks up the slots of the tile that begins at `token`, a thread each. store_slots keeps them later.
  PC_MEMBER void look_up(const PcAttentionParams& p, const PrefillItem& item, int token) {
    const int own = token + pc_thread();
    slot_ = {0, 0};
    if (pc_thread() < Tile::kTokens && item.keys.has(own)) slot_ = find_slot(p, item.sequence.table_row, own);
  }

  PC_MEMBER void store_slots(const PcAttentionParams& p, int turn) const {
    if (pc_thread() >= Tile::kTokens) return;
    slots_.store(2 * (turn * Tile::kTokens + pc_thread()), slot_offset(p.key, slot_));
    slots_.store(2 * (turn * Tile::kTokens + pc_thread()) + 1, slot_offset(p.value, slot_));
  }

  PC_MEMBER void copy_keys(const KeyRange& keys, int token, int turn) const {
    copy(key_, Tile::kShape.keys_begin(), keys, token, 2 * turn * Tile::kTokens);
  }
  PC_MEMBER void copy_values(const KeyRange& keys, int token, int turn) const {
    copy(value_, Tile::kShape.values_begin(), keys, token, 2 * turn * Tile::kTokens + 1);
  }

 private:
  PC_MEMBER void copy(const Global<T>& column, int target, const KeyRange& keys, int token, int first_slot) const {
    const int first_row = pc_thread() / Tile::kChunks;
    const SharedAddress first = shared_.address(target + Tile::at(first_row, pc_thread() % Tile::kChunks));
    PC_UNROLL
    for (int row = 0; row < Tile::kTokens; row += Tile::kCopyRows) {
      const pc_int64 from = static_cast<pc_int64>(slots_.load(first_slot + 2 * (first_row + row)));
      pc_copy_async(first + row * Tile::kRowBytes, column, from, keys.has(token + first_row + row));
    }
  }

  Global<T> key_, value_;  // of the head, at the thread's column
  Shared<pc_uint8> shared_;
  Shared<pc_uint64> slots_;
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
    const int query_row = item.query_begin + row / heads.count, head = heads.first + row % heads.count;
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
  static constexpr int kKeyTiles = Tile::kTokens / 8;
  static constexpr int kDimTiles = kDim / 8;

 public:
  PC_MEMBER PrefillRows(const Shared<pc_uint8>& shared, const ScoreRule& rule)
      : shared_(shared),
        ranges_((shared + Tile::kShape.ranges_begin()).template as<KeyRange>()),
        folded_((shared + Tile::kShape.sums_begin()).template as<float>()),
        rule_(rule) {}

  PC_MEMBER void start(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    const int first = pc_warp() * Tile::kWarpRows, num_rows = item.num_rows(heads);
    const int last = min_of(first + Tile::kWarpRows, num_rows) - 1;
    any_ = common_ = {0, 0};
    if (first <= last) {
      const int a = item.sequence.position(item.query_begin + first / heads.count);
      const int b = item.sequence.position(item.query_begin + last / heads.count);
      const KeyRange early = attended_keys(p, a, item.sequence.length);
      const KeyRange late = attended_keys(p, b, item.sequence.length);
      any_ = {early.begin, late.end};
      common_ = {late.begin, early.end};
    }
    if constexpr (kRowTiles > 1) {
      pc_sync_warp();
      ranges_.store(first + pc_lane(), load_row(p, heads, item, first + pc_lane()).keys);
      pc_sync_warp();
    } else {
      rows_[0] = load_row(p, heads, item, first + pc_lane() / 4);
      rows_[1] = load_row(p, heads, item, first + pc_lane() / 4 + 8);
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

  // Whether any of the warp's rows attends to keys of the tile that begins at `token`.
  PC_MEMBER bool attends_to(int token) const { return token < any_.end && token + Tile::kTokens > any_.begin; }

  // S, and then the weights of the tile that begins at `token`.
  PC_MEMBER void add_keys(const PcAttentionParams& p, int token) {
    multiply_keys();
    const bool edge = token < common_.begin || token + Tile::kTokens > common_.end;
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      if (Options::kFull || edge) change_tile(p, m, token, edge);
      float keep[2];
      add_to_softmax(rule_.factor, softmax_[m], s_[m], keep);
      // Mostly a tile has no larger score than those before it.
      if (pc_ballot(keep[0] != 1.0f || keep[1] != 1.0f) == 0) continue;
      PC_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) o_[m][n][i] *= keep[i / 2];
      }
    }
  }

  PC_MEMBER void add_values() {
    // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
    const SharedAddress first =
        shared_.address(Tile::kShape.values_begin() + Tile::at(pc_lane() % 16, pc_lane() / 16));
    PC_UNROLL
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      pc_uint32 weights[kRowTiles][4];
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) pack_weights<T>(s_[m][2 * k], s_[m][2 * k + 1], weights[m]);
      PC_UNROLL
      for (int n = 0; n < kDimTiles / 2; ++n) {
        pc_uint32 b[4];
        pc_load_matrices_transposed(b, Tile::right_of(first, 2 * n) + 16 * k * Tile::kRowBytes);
        PC_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          pc_multiply<T>(o_[m][2 * n], weights[m], b[0], b[1]);
          pc_multiply<T>(o_[m][2 * n + 1], weights[m], b[2], b[3]);
        }
      }
    }
  }

  // What keys with infinite or NaN values give to the rows that attend to them: bit t of `found` is key token + t.
  // Rows that do not attend to them have weights of 0.
  PC_MEMBER void add_by_hand(pc_uint64 found, int token) {
    for (int t = 0; found != 0; ++t, found >>= 1) {
      if ((found & 1) == 0) continue;
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        PC_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float weight = pc_shuffle(weight_of(m, r, t), pc_lane() / 4 * 4 + t % 8 / 2);
          if (weight == 0.0f) continue;
          PC_UNROLL
          for (int n = 0; n < kDimTiles; ++n) {
            const int at = Tile::kShape.values_begin() + Tile::at(t, n);
            const pc_uint32 pair = shared_.template as<pc_uint32>().load(at / 4 + pc_lane() % 4);
            o_[m][n][2 * r] = pc_fma(weight, low_of<T>(pair), o_[m][n][2 * r]);
            o_[m][n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o_[m][n][2 * r + 1]);
          }
        }
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
        scale_row(m, r, end.factor * value_scale);
        if (place.exists && pc_lane() % 4 == 0) store_lse(p, place.query_row, place.head, end.lse);
      }
    }
    gather_rows(p, heads, item);
  }

  // The keys of a split have been seen: to its partial rows.
  PC_MEMBER void store_part(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item,
                            const Splits& splits) {
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
        const pc_int64 row = splits.row(place.query);
        if (pc_lane() % 4 == 0) store_partial_lse(p, row, place.head, end.lse);
        store_row(partial, partial_offset(p, row, place.head), m, r);
      }
    }
  }

  // A piece of a tile that is not split has been seen: it joins those before it, in the partial rows from `own` on, and
  // the last of them goes to the output.
  PC_MEMBER void fold(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, pc_int64 own,
                      bool is_first, bool is_last) {
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
          scale_row(m, r, end.factor * value_scale);
          if (place.exists && pc_lane() % 4 == 0) store_lse(p, place.query_row, place.head, end.lse);
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
      gather_rows(p, heads, item);
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
    return {row, query, item.query_begin + query, heads.first + row % heads.count, row < item.num_rows(heads)};
  }

  PC_MEMBER static ScoreRow load_row(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, int row) {
    return load_score_row<Options>(p, item.sequence, item.query_begin + row / heads.count,
                                   heads.first + row % heads.count, row < item.num_rows(heads));
  }

  PC_MEMBER static pc_int64 partial_offset(const PcAttentionParams& p, pc_int64 row, int head) {
    return (row * p.num_query_heads + head) * kDim;
  }

  PC_MEMBER void multiply_keys() {
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
        Tile::kShape.keys_begin() + Tile::at(pc_lane() % 8 + pc_lane() / 16 * 8, pc_lane() / 8 % 2));
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

  PC_MEMBER void change_tile(const PcAttentionParams& p, int m, int token, bool edge) {
    const int first_key = token + 2 * (pc_lane() % 4);
    if constexpr (kRowTiles > 1) {
      const int row = pc_warp() * Tile::kWarpRows + 16 * m + pc_lane() / 4;
      ScoreRow rows[2];
      rows[0].keys = ranges_.load(row);
      rows[1].keys = ranges_.load(row + 8);
      change_scores<Options>(p, rule_, rows, first_key, edge, s_[m]);
    } else {
      change_scores<Options>(p, rule_, rows_, first_key, edge, s_[m]);
    }
  }

  // The lane's own of the weights of key t that it has, or of the one beside it.
  PC_MEMBER float weight_of(int m, int r, int t) const {
    float even = 0.0f, odd = 0.0f;
    PC_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      even = n == t / 8 ? s_[m][n][2 * r] : even;
      odd = n == t / 8 ? s_[m][n][2 * r + 1] : odd;
    }
    return t % 2 == 0 ? even : odd;
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

  // The warp's output, by way of the place of its queries, which nobody needs any more.
  PC_MEMBER void gather_rows(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    pc_sync_warp();
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = pc_warp() * Tile::kWarpRows + 16 * m + 8 * r + pc_lane() / 4;
        PC_UNROLL
        for (int n = 0; n < kDimTiles; ++n) {
          const pc_uint32 pair = pc_pack<T>(o_[m][n][2 * r], o_[m][n][2 * r + 1]);
          shared_.template as<pc_uint32>().store(Tile::at(row, n) / 4 + pc_lane() % 4, pair);
        }
      }
    }
    pc_sync_warp();
    const Global<T> out(p.out.data);
    const int end = min_of(Tile::kWarpRows, item.num_rows(heads) - pc_warp() * Tile::kWarpRows);
    for (int i = pc_lane(); i < end * Tile::kChunks; i += 32) {
      const int row = pc_warp() * Tile::kWarpRows + i / Tile::kChunks, chunk = i % Tile::kChunks;
      const pc_int64 to = row_offset(p.out, item.query_begin + row / heads.count, heads.first + row % heads.count);
      out.store_vector(to + chunk * 8, shared_.load_vector(Tile::at(row, chunk)));
    }
  }

  Shared<pc_uint8> shared_;
  Shared<KeyRange> ranges_;
  Shared<float> folded_;
  ScoreRule rule_;
  KeyRange any_, common_;  // keys that one, or all, of the warp's rows attend to
  ScoreRow rows_[2];
  Softmax softmax_[kRowTiles];
  float s_[kRowTiles][kKeyTiles][4];
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

// Zeros in place of the values of some keys.
template <int kDim, typename Options>
PC_DEVICE void clear_values(const Shared<pc_uint8>& shared, pc_uint64 found) {
  using Tile = PrefillTile<kDim, Options>;
  for (int i = pc_thread(); i < Tile::kTokens * Tile::kChunks; i += Tile::kThreads) {
    if ((found >> i / Tile::kChunks & 1) == 0) continue;
    shared.store_vector(Tile::kShape.values_begin() + 16 * i, {{0, 0, 0, 0}});
  }
}

// The tiles of an item. Before it and behind it all threads meet.
template <typename T, int kDim, typename Options>
PC_DEVICE void run_item(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, const Splits& splits,
                        const Shared<pc_uint8>& shared, const ScoreRule& rule) {
  using Tile = PrefillTile<kDim, Options>;
  PrefillFeed<T, kDim, Options> feed(p, shared, heads.kv);
  PrefillRows<T, kDim, Options> rows(shared, rule);
  const bool folds = p.fold_tokens != 0 && splits.count == 1;
  const pc_int64 own_rows = p.num_partial_rows - static_cast<pc_int64>(pc_num_blocks_x() - pc_block_x()) *
                                                     max_of(Tile::kRows / heads.count, 1);
  bool is_first = true;
  int token = item.keys.begin / Tile::kTokens * Tile::kTokens, turn = 0;

  feed.look_up(p, item, token);
  feed.store_slots(p, turn);
  rows.start(p, heads, item);
  pc_sync_block();
  copy_queries<T, kDim, Options>(p, heads, item, shared);
  feed.copy_keys(item.keys, token, turn);
  pc_commit_copies();
  feed.look_up(p, item, token + Tile::kTokens);
  if (rule.negate) {
    pc_wait_copies<0>();
    negate_queries<kDim, Options>(shared);
  }

  for (; token < item.keys.end; token += Tile::kTokens, turn ^= 1) {
    feed.store_slots(p, turn ^ 1);
    pc_wait_copies<0>();
    pc_sync_block();  // the keys are there, and nobody needs the values before
    feed.copy_values(item.keys, token, turn);
    pc_commit_copies();
    const bool attends = rows.attends_to(token);
    if (attends) rows.add_keys(p, token);
    pc_wait_copies<0>();
    pc_sync_block();  // the values are there, and nobody needs the keys
    if (token + Tile::kTokens < item.keys.end) feed.copy_keys(item.keys, token + Tile::kTokens, turn ^ 1);
    pc_commit_copies();
    feed.look_up(p, item, token + 2 * Tile::kTokens);

    const bool edge = token < item.common.begin || token + Tile::kTokens > item.common.end;
    if ((edge && item.query_count > 1) || (Options::kFull && p.mask != 0)) {
      const pc_uint64 found = find_not_finite<T, kDim, Options>(shared);
      if (found != 0) {
        if (attends) rows.add_by_hand(found, token);
        pc_sync_block();
        clear_values<kDim, Options>(shared, found);
        pc_sync_block();
      }
    }
    if (attends) rows.add_values();
    const int next = token + Tile::kTokens;
    if (folds && next % p.fold_tokens == 0 && next < item.keys.end) {
      rows.fold(p, heads, item, own_rows, is_first, false);
      is_first = false;
    }
  }
  pc_wait_copies<0>();

  if (splits.count > 1) {
    rows.store_part(p, heads, item, splits);
  } else if (folds) {
    rows.fold(p, heads, item, own_rows, is_first, true);
  } else {
    rows.store_whole(p, heads, item);
  }
}

template <typename T, int kDim, typename Options>
PC_KERNEL(pc_prefill_shape(kDim, Options::kFull).threads, pc_prefill_shape(kDim, Options::kFull).blocks_per_sm)
void prefill(const PcAttentionParams p) {
  using Tile = PrefillTile<kDim, Options>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  clear_padding(p, heads);
  for (int i = work.first; i < work.end; ++i) {
    PcWorkItem planned = load_item(p.schedule, i);
    const Splits splits = splits_of(planned);
    PrefillItem item;
    item.sequence = load_sequence(p, planned.sequence);
    fit_item(p, item.sequence, planned);
    item.query_begin = planned.query_begin;
    item.query_count = planned.query_count;
    item.keys = {planned.key_begin, planned.key_end};
    item.common = common_keys(p, item.sequence, planned);
    run_item<T, kDim, Options>(p, heads, item, splits, shared, rule);
    pc_sync_block();
    if (splits.count == 1) continue;
    if (is_last_part(p, splits, (shared + Tile::kShape.words_begin()).template as<int>())) {
      join_splits<4>(p, heads, planned, splits);
    }
    pc_sync_block();
  }
}

}  // namespace pagecore
