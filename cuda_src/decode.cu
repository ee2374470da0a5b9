// Attention of few queries over many keys: 16-bit caches, head dims 64, 128 and 256.
//
// A CTA is one worker of the schedule for one key head. Its items have at most 16 packed rows, query * heads + head:
// the left operand of m16n8k16, so that keys and values are read once for all query heads that share them.
//
//               16 keys of a warp's tile
//             +--------------------------+
//   16 rows   |  S = Q K^T               |   Q   registers, head_dim / 16 fragments, all item long
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
// Copies: every warp has a ring of `stages` tiles, each of 16 keys and 16 values, 64 * head_dim bytes; K and V are
// groups of their own, so that S is computed while V is on its way. A stage is filled again as soon as it is used up,
// over the ends of items. In flight on a multiprocessor of 2 CTAs: head_dim 64: 128 KiB, 128 and 256: 192 KiB, three to
// five times what 4.8 TB/s take in a microsecond. The table is looked up one tile before its slots are needed.
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
  static constexpr int kCopies = kTokens * kChunks / 32;  // of a lane, for keys and for values

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kPlaneBytes, "");
  static_assert(kRing.stage_bytes == PcRingShape::kRows * kDim * 4, "the sums of an item lie in a stage");

  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
};

// A warp's ring and what fills it.
template <typename T, int kDim>
class DecodeRing {
  using Tile = DecodeTile<kDim>;

 public:
  PC_MEMBER DecodeRing(const PcAttentionParams& p, const Shared<pc_uint8>& shared, int kv_head)
      : key_(p.key.data),
        value_(p.value.data),
        ring_(shared + pc_warp() * Tile::kRing.ring_bytes()),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kTokens * PcRingShape::kSlotBytes))
                   .template as<pc_uint64>()),
        kv_head_(kv_head) {}

  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work) {
    walk_.start(p, work);
    PC_UNROLL
    for (int stage = 0; stage < Tile::kStages; ++stage) fill(p, stage);
  }

  // Begins to fill a stage with the next tile; always two groups of copies. No lane may still read the stage.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    if (walk_.at_end() || walk_.is_empty()) {
      pc_commit_copies();
      pc_commit_copies();
    } else {
      if (pc_lane() < Tile::kTokens) {
        slots_.store(2 * pc_lane(), slot_offset(p.key, walk_.slot(), kv_head_));
        slots_.store(2 * pc_lane() + 1, slot_offset(p.value, walk_.slot(), kv_head_));
      }
      pc_sync_warp();
      copy(key_, stage * Tile::kRing.stage_bytes, 0);
      copy(value_, stage * Tile::kRing.stage_bytes + Tile::kPlaneBytes, 1);
    }
    if (!walk_.at_end()) walk_.advance(p);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return ring_ + stage * Tile::kRing.stage_bytes; }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return keys(stage) + Tile::kPlaneBytes; }

  // Until the keys, or all, of the oldest tile are there for the whole warp.
  PC_MEMBER void wait_for_keys() const {
    pc_wait_copies<2 * Tile::kStages - 1>();
    pc_sync_warp();
  }
  PC_MEMBER void wait_for_values() const {
    pc_wait_copies<2 * Tile::kStages - 2>();
    pc_sync_warp();
  }

 private:
  // A plane of 16 tokens: a lane copies one chunk of every 32 / kChunks rows.
  PC_MEMBER void copy(const Global<T>& plane, int target, int which) {
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; ++i) {
      const int row = (i * 32 + pc_lane()) / Tile::kChunks, chunk = (i * 32 + pc_lane()) % Tile::kChunks;
      const pc_int64 from = static_cast<pc_int64>(slots_.load(2 * row + which)) + chunk * 8;
      pc_copy_async(ring_.address(target + Tile::at(row, chunk)), plane, from,
                    walk_.keys().has(walk_.first_token() + row));
    }
    pc_commit_copies();
  }

  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
  Global<T> key_, value_;
  Shared<pc_uint8> ring_;
  Shared<pc_uint64> slots_;
  int kv_head_;
};

// What a warp has of an item: 16 rows of queries, and their sums over its own tiles.
template <typename T, int kDim, typename Options>
class DecodeRows {
  using Tile = DecodeTile<kDim>;

 public:
  PC_MEMBER void start(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                       const ScoreRule& rule) {
    const Global<pc_uint32> query(p.query.data);
    const pc_uint32 signs = rule.negate ? 0x80008000u : 0;
    common_ = common_keys(p, sequence, item);
    several_ = item.query_count > 1;
    PC_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int packed = pc_lane() / 4 + 8 * r;
      const bool exists = packed < item.query_count * heads.count;
      query_[r] = packed / heads.count;
      const int query_row = item.query_begin + query_[r], head = heads.first + packed % heads.count;
      rows_[r] = load_score_row<Options>(p, sequence, query_row, head, exists);
      const pc_int64 from = exists ? row_offset(p.query, query_row, head) / 2 + pc_lane() % 4 : 0;
      PC_UNROLL
      for (int k = 0; k < kDim / 16; ++k) {
        PC_UNROLL
        for (int half = 0; half < 2; ++half) {
          q_[k][2 * half + r] = exists ? query.load(from + 8 * k + 4 * half) ^ signs : 0;
        }
      }
    }
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
    // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
    const int row = pc_lane() % 8 + pc_lane() / 16 * 8, chunk = pc_lane() / 8 % 2;
    PC_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      pc_uint32 b[4];
      pc_load_matrices(b, keys.address(Tile::at(row, 2 * k + chunk)));
      pc_multiply<T>(s_[0], q_[k], b[0], b[1]);
      pc_multiply<T>(s_[1], q_[k], b[2], b[3]);
    }
    edge_ = token < common_.begin || token + Tile::kTokens > common_.end;
    change_scores<Options>(p, rule, rows_, token + 2 * (pc_lane() % 4), edge_, s_);
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

  PC_MEMBER void add_values(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item,
                            const Shared<pc_uint8>& values, int token) {
    pc_uint32 weights[4];
    pack_weights<T>(s_[0], s_[1], weights);
    const bool mixed = (edge_ && several_) || (Options::kFull && p.mask != 0);
    if (mixed && has_not_finite(values)) return add_values_apart(p, sequence, item, weights, values, token);
    PC_UNROLL
    for (int n = 0; n < kDim / 16; ++n) {
      pc_uint32 b[4];
      load_values(values, n, b);
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
  // Matrices: keys 0-7 and 8-15, of dims 16 * n and 16 * n + 8.
  PC_MEMBER static void load_values(const Shared<pc_uint8>& values, int n, pc_uint32 (&b)[4]) {
    pc_load_matrices_transposed(b, values.address(Tile::at(pc_lane() % 16, 2 * n + pc_lane() / 16)));
  }

  PC_MEMBER static bool has_not_finite(const Shared<pc_uint8>& values) {
    bool found = false;
    for (int i = 0; i < Tile::kCopies; ++i) {
      const pc_vector v = values.load_vector((i * 32 + pc_lane()) * 16);
      for (int k = 0; k < 4; ++k) found = found || is_not_finite<T>(v.word[k]);
    }
    return pc_ballot(found) != 0;
  }

  PC_MEMBER void add_values_apart(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item,
                                  const pc_uint32 (&weights)[4], const Shared<pc_uint8>& values, int token) {
    for (int query = 0; query < item.query_count; ++query) {
      const ScoreRow row = load_score_row<Options>(p, sequence, item.query_begin + query, 0, true);
      const PairMask mask = mask_pairs<Options>(p, row, token + 2 * (pc_lane() % 4));
      PC_UNROLL
      for (int n = 0; n < kDim / 16; ++n) {
        pc_uint32 b[4];
        load_values(values, n, b);
        float low[4] = {0.0f, 0.0f, 0.0f, 0.0f}, high[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        pc_multiply<T>(low, weights, b[0] & mask.low, b[1] & mask.high);
        pc_multiply<T>(high, weights, b[2] & mask.low, b[3] & mask.high);
        PC_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (query_[i / 2] != query) continue;
          o_[2 * n][i] += low[i];
          o_[2 * n + 1][i] += high[i];
        }
      }
    }
  }

  KeyRange common_;
  bool several_, edge_;
  int query_[2];
  ScoreRow rows_[2];
  pc_uint32 q_[kDim / 16][4];
  Softmax softmax_;
  float s_[2][4];
  float o_[kDim / 8][4];
};

// Where the warps' sums of an item meet: largest scores (factor included) and sums, and O in a stage of each ring.
template <int kDim>
class DecodeExchange {
  using Tile = DecodeTile<kDim>;
  static constexpr int kRows = PcRingShape::kRows;

 public:
  PC_MEMBER DecodeExchange(const Shared<pc_uint8>& shared, int stage)
      : sums_((shared + Tile::kRing.sums_begin()).template as<float>()),
        o_((shared + stage * Tile::kRing.stage_bytes).template as<float>()) {}

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
      PC_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        const pc_uint64 low = pc_float_to_bits(rows.low(n, r)), high = pc_float_to_bits(rows.high(n, r));
        o_.template as<pc_uint64>().store(at(pc_warp(), row, 8 * n + 2 * (pc_lane() % 4)) / 2, low | high << 32);
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
  PC_MEMBER static int at(int warp, int row, int d) {
    return warp * (Tile::kRing.ring_bytes() / 4) + row * kDim + (d ^ ((row & 3) << 3));
  }

  Shared<float> sums_, o_;
};

// The rows of an item whose keys have all been seen: the output itself, or the item's part of it. `rounds` 0: there
// were no keys, and nothing has been exchanged.
template <int kDim>
PC_DEVICE void store_rows(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, const Splits& splits,
                          const DecodeExchange<kDim>& exchange, int rounds) {
  const float value_scale = load_number(p.value_scale, heads.kv, 1.0f);
  const int tasks = item.query_count * heads.count * (kDim / 4);
  for (int task = pc_thread(); task < tasks; task += pc_num_threads()) {
    const int row = task / (kDim / 4), d = task % (kDim / 4) * 4;
    const int query = row / heads.count, head = heads.first + row % heads.count;
    typename DecodeExchange<kDim>::Sums sums = {-pc_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (rounds != 0) sums = exchange.load(row, d);
    const bool whole = splits.count == 1;
    const RowEnd end = end_row(sums.top, sums.sum, whole ? load_sink(p, head) : -pc_infinity());
    const float factor = whole ? end.factor * value_scale : end.factor;
    PC_UNROLL
    for (int k = 0; k < 4; ++k) sums.x[k] *= factor;
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

template <typename T, int kDim, typename Options>
PC_KERNEL(pc_decode_shape(kDim).threads, pc_decode_shape(kDim).blocks_per_sm)
void decode(const PcAttentionParams p) {
  using Tile = DecodeTile<kDim>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeRing<T, kDim> ring(p, shared, heads.kv);
  ring.start(p, work);
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  clear_padding(p, heads);

  int stage = 0;
  DecodeRows<T, kDim, Options> rows;
  for (int i = work.first; i < work.end; ++i) {
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    const Sequence sequence = load_sequence(p, item.sequence);
    fit_item(p, sequence, item);
    rows.start(p, heads, sequence, item, rule);

    const int rounds = count_rounds(item, Tile::kTokens, Tile::kWarps);
    int token = first_tile_token(item, Tile::kTokens) + pc_warp() * Tile::kTokens;
    for (int round = 0; round < rounds; ++round) {
      ring.wait_for_keys();
      if (token < item.key_end) rows.add_keys(p, rule, ring.keys(stage), token);
      ring.wait_for_values();
      if (token < item.key_end) rows.add_values(p, sequence, item, ring.values(stage), token);
      token += Tile::kTokens * Tile::kWarps;
      pc_sync_warp();
      if (round == rounds - 1) break;
      ring.fill(p, stage);
      stage = stage == Tile::kStages - 1 ? 0 : stage + 1;
    }

    rows.complete();
    const DecodeExchange<kDim> exchange(shared, stage);
    if (rounds != 0) exchange.store(rows, rule.factor, item.query_count * heads.count);
    pc_sync_block();
    store_rows<kDim>(p, heads, item, splits, exchange, rounds);
    pc_sync_block();
    if (rounds != 0) {
      ring.fill(p, stage);
      stage = stage == Tile::kStages - 1 ? 0 : stage + 1;
    }
    if (splits.count == 1) continue;
    if (is_last_part(p, splits, (shared + Tile::kRing.flag_begin()).template as<int>())) {
      join_splits<4>(p, heads, item, splits);
    }
  }
  pc_wait_copies<0>();
}

}  // namespace pagecore
