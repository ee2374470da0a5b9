// Attention of few queries over many keys: 16-bit caches, head dims 64, 128 and 256.
//
// A CTA is one worker of the schedule for one key head. Its items have at most 16 packed rows, query * heads + head:
// the left operand of m16n8k16, so that keys and values are read once for all query heads that share them.
//
//               16 keys of a warp's tile
//             +--------------------------+
//   16 rows   |  S = Q K^T               |   Q   shared memory, all item long, ldmatrix
//             +--------------------------+   K   shared memory, ldmatrix
//                                            S   registers: 2 fragments, weights are repacked as left operand
//               head_dim
//             +--------------------------+   V   shared memory, ldmatrix transposed
//   16 rows   |  O += P V                |   O   registers, head_dim / 8 fragments
//             +--------------------------+
//
// Warps take tiles in turn (tile_walk.cuh), each with a running softmax of its own, and meet only when an item ends:
// sums and O go through shared memory, O into the stage that was used up last.
//
// Copies: every warp has a ring of `stages` tiles, each of 16 keys and 16 values, 64 * head_dim bytes. A stage is
// filled again as soon as it is used up, over the ends of items. A CTA's rings are of 64 KiB, so that two CTAs have 128
// KiB in flight on a multiprocessor of an H200: 3.5 times its share of 4.8 TB/s in a microsecond, and enough while one
// of the two ends an item. The table is looked up one tile before its slots are needed.
//
// Shared memory: a row of 2 * head_dim bytes has its 16-byte chunks permuted, chunk c of row r at c ^ (r % 8): copies
// write and ldmatrix reads all 32 banks. A row of O has its groups of 8 numbers permuted alike, by r % 4.
//
// Bytes: keys and values once; queries once for each split; partial rows, float32, once written and once read.

#include "splits.cuh"
#include "tile_walk.cuh"
#include "values.cuh"

namespace pagecore {

template <int kDim>
struct DecodeTile {
  static constexpr PcRingShape kRing = pc_decode_ring(kDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kPlaneBytes = kTokens * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kChunks;  // that a warp copies
  static constexpr int kCopies = kTokens / kRowsAtOnce;

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kPlaneBytes, "");
  static_assert(kRing.stage_bytes == kRing.warp_rows * kDim * 4, "the sums of an item lie in a stage");

  PC_MEMBER static int next(int stage) { return stage == kStages - 1 ? 0 : stage + 1; }

  // Where chunk c of row r lies, and how an address is moved on: r by a multiple of a power of two above it, c by an
  // even number. Those of a lane differ by constants, so that one register serves them all.
  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
  PC_MEMBER static SharedAddress below(SharedAddress address, int rows) {
    return (address ^ ((rows & 7) << 4)) + rows * kRowBytes;
  }
  PC_MEMBER static SharedAddress right_of(SharedAddress address, int chunks) {
    return (address ^ ((chunks & 7) << 4)) + ((chunks & ~7) << 4);
  }
};

// A warp's ring and what fills it.
template <typename T, int kDim>
class DecodeRing {
  using Tile = DecodeTile<kDim>;

 public:
  PC_MEMBER DecodeRing(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                       const WorkRange& work)
      : key_(p.key.data),
        value_(p.value.data),
        ring_(shared + pc_warp() * Tile::kRing.ring_bytes()),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {
    key_ = key_ + heads.kv * p.key.head_stride;
    value_ = value_ + heads.kv * p.value.head_stride;
    walk_.start(p, work, 0, heads.count);
  }

  // Begins to fill a stage with the next tile, behind a barrier of the warp; always one group of copies.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.meets(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots_.store(2 * pc_lane(), (key_ + slot_offset(p.key, slot)).address());
      slots_.store(2 * pc_lane() + 1, (value_ + slot_offset(p.value, slot)).address());
    }
    pc_sync_warp();
    if (!empty) copy(stage, state);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return ring_ + stage * Tile::kRing.stage_bytes; }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return keys(stage) + Tile::kPlaneBytes; }

  // Until the oldest tile is there for the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();
    pc_sync_warp();
  }

 private:
  // A lane copies one chunk of every 32 / kChunks rows, of keys and of values. Several slots are read before any copy
  // begins: behind one, no read of shared memory is moved forward.
  PC_MEMBER void copy(int stage, const WalkState& state) const {
    constexpr int kAhead = Tile::kCopies < 8 ? Tile::kCopies : kDim <= 128 ? 8 : 4;
    const int first_row = pc_lane() / Tile::kChunks, chunk = pc_lane() % Tile::kChunks;
    const SharedAddress first = keys(stage).address(Tile::at(first_row, chunk));
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; i += kAhead) {
      pc_address key[kAhead], value[kAhead];
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int row = first_row + (i + k) * Tile::kRowsAtOnce;
        key[k] = slots_.load(2 * row);
        value[k] = slots_.load(2 * row + 1);
      }
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int rows = (i + k) * Tile::kRowsAtOnce;
        const bool valid = state.keys.has(state.token + first_row + rows);
        const SharedAddress to = Tile::below(first, rows);
        pc_copy_async(to, Global<pc_uint8>(key[k]), chunk * 16, valid);
        pc_copy_async(to + Tile::kPlaneBytes, Global<pc_uint8>(value[k]), chunk * 16, valid);
      }
    }
  }

  Global<T> key_, value_;  // of the head
  Shared<pc_uint8> ring_;
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

// The queries of an item to shared memory; rows that it does not have are 0.
template <typename T, int kDim>
PC_DEVICE void load_queries(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, bool negate,
                            const Shared<pc_uint8>& queries) {
  using Tile = DecodeTile<kDim>;
  const Global<T> query(p.query.data);
  const pc_uint32 signs = negate ? 0x80008000u : 0;
  PC_UNROLL
  for (int i = 0; i < Tile::kRing.warp_rows * Tile::kChunks / (32 * Tile::kWarps); ++i) {
    const int at = i * (32 * Tile::kWarps) + pc_thread();
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
    pc_vector v = {{0, 0, 0, 0}};
    if (row < item.query_count * heads.count) {
      const int query_row = item.query_begin + row / heads.count, head = heads.first + row % heads.count;
      v = query.load_vector(row_offset(p.query, query_row, head) + chunk * 8);
      for (int k = 0; k < 4; ++k) v.word[k] ^= signs;
    }
    queries.store_vector(Tile::at(row, chunk), v);
  }
}

// What a warp has of an item: 16 rows of queries, and their sums over its own tiles.
template <typename T, int kDim, typename Options>
class DecodeRows {
  using Tile = DecodeTile<kDim>;

 public:
  PC_MEMBER explicit DecodeRows(const Shared<pc_uint8>& shared)
      : queries_(shared + Tile::kRing.queries_begin()),
        score_rows_((shared + Tile::kRing.score_rows_begin()).template as<ScoreRow>()) {}

  // The block's queries and what they attend to go to shared memory; a barrier is to follow.
  PC_MEMBER void start(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                       bool negate) {
    load_queries<T, kDim>(p, heads, item, negate, queries_);
    if (pc_thread() < Tile::kRing.warp_rows) {
      const int query_row = item.query_begin + pc_thread() / heads.count,
                head = heads.first + pc_thread() % heads.count;
      const bool exists = pc_thread() < item.query_count * heads.count;
      score_rows_.store(pc_thread(), load_score_row<Options>(p, sequence, item, query_row, head, exists));
    }
    common_ = common_keys(p, sequence, item);
    several_ = item.query_count > 1;
    softmax_.clear();
    PC_UNROLL
    for (int n = 0; n < kDim / 8; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0f;
    }
  }

  // One tile, keys `token` .. token + 15; weights are left for add_values.
  PC_MEMBER void add_keys(const PcAttentionParams& p, const ScoreRule& rule, const Shared<pc_uint8>& keys, int token) {
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) s_[n][i] = 0.0f;
    }
    // Matrices: of queries rows 0-7 and 8-15, for two chunks of 8 dims; of keys two chunks, for 0-7 and 8-15.
    const SharedAddress first_query = queries_.address(Tile::at(pc_lane() % 16, pc_lane() / 16));
    const SharedAddress first = keys.address(Tile::at(pc_lane() % 8 + pc_lane() / 16 * 8, pc_lane() / 8 % 2));
    PC_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      pc_uint32 q[4], b[4];
      pc_load_matrices(q, Tile::right_of(first_query, 2 * k));
      pc_load_matrices(b, Tile::right_of(first, 2 * k));
      pc_multiply<T>(s_[0], q, b[0], b[1]);
      pc_multiply<T>(s_[1], q, b[2], b[3]);
    }
    edge_ = token < common_.begin || token + Tile::kTokens > common_.end;
    if (Options::kFull || edge_) {
      const ScoreRow rows[2] = {score_rows_.load(pc_lane() / 4), score_rows_.load(pc_lane() / 4 + 8)};
      change_scores<Options>(p, rule, rows, token + 2 * (pc_lane() % 4), edge_, s_);
    }
    float keep[2];
    add_to_softmax(rule.factor, softmax_, s_, keep);
    // Mostly a tile has no larger score than those before it.
    if (pc_ballot(keep[0] != 1.0f || keep[1] != 1.0f) == 0) return;
    PC_UNROLL
    for (int n = 0; n < kDim / 8; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o_[n][i] *= keep[i / 2];
    }
  }

  PC_MEMBER void add_values(const PcAttentionParams& p, const Shared<pc_uint8>& values, int token) {
    pc_uint32 weights[4];
    pack_weights<T>(s_[0], s_[1], weights);
    if ((edge_ && several_) || (Options::kFull && p.mask != 0)) add_not_finite(p, values, token);
    const SharedAddress first = first_values(values);
    PC_UNROLL
    for (int n = 0; n < kDim / 16; ++n) {
      pc_uint32 b[4];
      pc_load_matrices_transposed(b, Tile::right_of(first, 2 * n));
      pc_multiply<T>(o_[2 * n], weights, b[0], b[1]);
      pc_multiply<T>(o_[2 * n + 1], weights, b[2], b[3]);
    }
  }

  // Row r of the lane's two: its largest score and the sum that counts from it.
  PC_MEMBER void complete() { complete_softmax(softmax_); }
  PC_MEMBER float top(int r) const { return softmax_.top[r]; }
  PC_MEMBER float sum(int r) const { return softmax_.sum[r]; }
  // Dims 8 * n + 2 * (lane % 4) and the next of it.
  PC_MEMBER float low(int n, int r) const { return o_[n][2 * r]; }
  PC_MEMBER float high(int n, int r) const { return o_[n][2 * r + 1]; }

 private:
  // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
  PC_MEMBER static SharedAddress first_values(const Shared<pc_uint8>& values) {
    return values.address(Tile::at(pc_lane() % 16, pc_lane() / 16));
  }

  // A bit for each key of the tile that has a value which is infinite or NaN.
  PC_MEMBER static int find_not_finite(const Shared<pc_uint8>& values) {
    int found = 0;
    for (int i = 0; i < Tile::kCopies; ++i) {
      const pc_vector v = values.load_vector((i * 32 + pc_lane()) * 16);
      for (int k = 0; k < 4; ++k) {
        if (is_not_finite<T>(v.word[k])) found |= 1 << (i * 32 + pc_lane()) / Tile::kChunks;
      }
    }
    return or_of_warp(found);
  }

  // What such keys give to the rows that attend to them. From then on zeros stand in their place.
  PC_MEMBER void add_not_finite(const PcAttentionParams& p, const Shared<pc_uint8>& values, int token) {
    const int found = find_not_finite(values);
    if (found == 0) return;
    const ScoreRow rows[2] = {score_rows_.load(pc_lane() / 4), score_rows_.load(pc_lane() / 4 + 8)};
    for (int t = 0; t < Tile::kTokens; ++t) {
      if ((found >> t & 1) == 0) continue;
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float even = t < 8 ? s_[0][2 * r] : s_[1][2 * r], odd = t < 8 ? s_[0][2 * r + 1] : s_[1][2 * r + 1];
        const float weight = pc_shuffle(t % 2 == 0 ? even : odd, pc_lane() / 4 * 4 + t % 8 / 2);
        if (!attends<Options>(p, rows[r], token + t)) continue;
        PC_UNROLL
        for (int n = 0; n < kDim / 8; ++n) {
          const pc_uint32 pair = values.template as<pc_uint32>().load(Tile::at(t, n) / 4 + pc_lane() % 4);
          o_[n][2 * r] = pc_fma(weight, low_of<T>(pair), o_[n][2 * r]);
          o_[n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o_[n][2 * r + 1]);
        }
      }
      pc_sync_warp();
      if (pc_lane() < Tile::kChunks) values.store_vector(Tile::at(t, pc_lane()), {{0, 0, 0, 0}});
    }
    pc_sync_warp();
  }

  Shared<pc_uint8> queries_;
  Shared<ScoreRow> score_rows_;
  KeyRange common_;
  bool several_, edge_;
  Softmax softmax_;
  float s_[2][4];
  float o_[kDim / 8][4];
};

// Where the warps' sums of an item meet: largest scores (factor included) and sums, and O in a stage of each ring.
template <int kDim>
class DecodeExchange {
  using Tile = DecodeTile<kDim>;
  static constexpr int kRows = Tile::kRing.warp_rows;

 public:
  PC_MEMBER DecodeExchange(const Shared<pc_uint8>& shared, int stage)
      : sums_((shared + Tile::kRing.sums_begin()).template as<float>()),
        o_(shared.template as<float>()),
        stage_(stage * (Tile::kRing.stage_bytes / 4)) {}

  template <typename Rows>
  PC_MEMBER void store(const Rows& rows, float factor, int num_rows) const {
    PC_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = pc_lane() / 4 + 8 * r;
      if (row >= num_rows) continue;
      if (pc_lane() % 4 == 0) {
        sums_.store(2 * (pc_warp() * kRows + row), rows.top(r) * factor);
        sums_.store(2 * (pc_warp() * kRows + row) + 1, rows.sum(r));
      }
      const int first = at(pc_warp(), row, 2 * (pc_lane() % 4));
      PC_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        const pc_uint64 low = pc_float_to_bits(rows.low(n, r)), high = pc_float_to_bits(rows.high(n, r));
        const int to = (first ^ (8 * n & 24)) + (8 * n & ~24);  // at(warp, row, 8 * n + ...)
        o_.template as<pc_uint64>().store(to / 2, low | high << 32);
      }
    }
  }

  // Four numbers of a row, over all warps: what end_row and the output are made of.
  struct Sums {
    float top, sum;
    float x[4];
  };

  PC_MEMBER Sums load(int row, int d) const {
    Sums sums = {-pc_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    PC_UNROLL
    for (int w = 0; w < Tile::kWarps; ++w) sums.top = pc_max(sums.top, sums_.load(2 * (w * kRows + row)));
    const float origin = finite_or_zero(sums.top);
    PC_UNROLL
    for (int w = 0; w < Tile::kWarps; ++w) {
      const float weight = pc_exp2(sums_.load(2 * (w * kRows + row)) - origin);
      const pc_vector v = o_.load_vector(at(w, row, d));
      sums.sum = pc_fma(weight, sums_.load(2 * (w * kRows + row) + 1), sums.sum);
      PC_UNROLL
      for (int k = 0; k < 4; ++k) sums.x[k] = pc_fma(weight, pc_bits_to_float(v.word[k]), sums.x[k]);
    }
    return sums;
  }

 private:
  PC_MEMBER int at(int warp, int row, int d) const {
    return stage_ + warp * (Tile::kRing.ring_bytes() / 4) + row * kDim + (d ^ ((row & 3) << 3));
  }

  Shared<float> sums_, o_;
  int stage_;
};

// The rows of item i, whose keys have all been seen: the output itself, or the item's part of it. Where it has no keys
// nothing has been exchanged. What the rounds do without is read again rather than kept in registers.
template <int kDim>
PC_DEVICE void store_rows(const PcAttentionParams& p, const Heads& heads, int i, const DecodeExchange<kDim>& exchange,
                          bool has_keys) {
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  const bool whole = splits.count == 1;
  const float value_scale = whole ? load_number(p.value_scale, heads.kv, 1.0f) : 1.0f;
  const int tasks = item.query_count * heads.count * (kDim / 4);
  for (int task = pc_thread(); task < tasks; task += pc_num_threads()) {
    const int row = task / (kDim / 4), d = task % (kDim / 4) * 4;
    const int query = row / heads.count, head = heads.first + row % heads.count;
    typename DecodeExchange<kDim>::Sums sums = {-pc_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (has_keys) sums = exchange.load(row, d);
    const RowEnd end = end_row(sums.top, sums.sum, whole ? load_sink(p, head) : -pc_infinity());
    PC_UNROLL
    for (int k = 0; k < 4; ++k) sums.x[k] *= end.factor * value_scale;
    const int query_row = item.query_begin + query;
    if (whole) {
      store_floats<4>(p.query_type, p.out.data, row_offset(p.out, query_row, head) + d, sums.x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_partial<4>(p, splits.row(query), head, d, sums.x);
      if (d == 0) store_partial_lse(p, splits.row(query), head, end.lse);
    }
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<int>& flag) {
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  if (splits.count > 1) join_if_last<4>(p, heads, item, splits, flag);
}

template <typename T, int kDim, typename Options>
PC_KERNEL(pc_decode_shape(kDim).threads, pc_decode_shape(kDim).blocks_per_sm)
void decode(const PcAttentionParams p) {
  using Tile = DecodeTile<kDim>;
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeRing<T, kDim> ring(p, shared, heads, work);
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  DecodeRows<T, kDim, Options> rows(shared);

  // A pass of this loop is one round of an item, or an item without keys.
  int i = work.first - 1, rounds = 0, token = 0, num_rows = 0;
  KeyRange keys = {0, 0};
  int stage = 0, num_used = Tile::kStages;  // stages that can be filled: this one and those behind it
  while (true) {
    for (; num_used > 0; --num_used) {
      ring.fill(p, stage);
      stage = Tile::next(stage);
    }
    // All stages are on their way, and `stage` is the oldest.
    if (rounds == 0) {
      if (i >= work.first) join_item(p, heads, i, (shared + Tile::kRing.flag_begin()).template as<int>());
      if (++i >= work.end) break;
      PcWorkItem item = load_item(p.schedule, i);
      const Sequence sequence = load_sequence(p, item.sequence);
      fit_item(p, sequence, item);
      rows.start(p, heads, sequence, item, rule.negate);
      rounds = ItemRounds::count(item);
      token = ItemRounds::first_token(item) + pc_warp() * Tile::kTokens;
      keys = {item.key_begin, item.key_end};
      num_rows = item.query_count * heads.count;
      pc_sync_block();
      if (rounds == 0) {
        store_rows<kDim>(p, heads, i, DecodeExchange<kDim>(shared, stage), false);
        pc_sync_block();
        continue;
      }
    }

    ring.wait();
    if (keys.meets(token, Tile::kTokens)) {
      rows.add_keys(p, rule, ring.keys(stage), token);
      rows.add_values(p, ring.values(stage), token);
    }
    token += ItemRounds::kStep;
    num_used = 1;
    if (--rounds == 0) {
      const DecodeExchange<kDim> exchange(shared, stage);
      rows.complete();
      pc_sync_warp();
      exchange.store(rows, rule.factor, num_rows);
      pc_sync_block();
      store_rows<kDim>(p, heads, i, exchange, true);
      pc_sync_block();
    }
  }
  clear_padding(p, heads, padding);
  pc_wait_copies<0>();
}

}  // namespace pagecore
