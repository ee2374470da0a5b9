// The rows of an item of decode.cu: their queries, the sums of a warp, and the exchange of sums between warps.
#pragma once

#include "cuda_src/attention/decode/ring.cuh"
#include "cuda_src/attention/softmax/splits.cuh"

namespace pagecore {

// Loads the queries of an item into shared memory. Rows past the rows of the item, and dims past head_dim, become 0.
template <typename Tile>
PC_DEVICE void load_queries(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, bool negate,
                            const Shared<pc_uint8>& queries) {
  using Row = typename Tile::KeyRow;
  const Global<typename Tile::Element> query(p.query.data);
  const pc_uint32 signs = negate ? 0x80008000u : 0;
  PC_UNROLL
  for (int i = 0; i < Tile::kRing.warp_rows * Row::kChunks / (32 * Tile::kWarps); ++i) {
    const int at = i * (32 * Tile::kWarps) + pc_thread();
    const int row = at / Row::kChunks, chunk = at % Row::kChunks;
    pc_vector v = {{0, 0, 0, 0}};
    if (row < item.query_count * heads.count && chunk * 8 < p.head_dim) {  // fault: decode_queries_past_dims
      const int query_row = item.query_begin + row / heads.count, head = heads.first + row % heads.count;
      v = query.load_vector(row_offset(p.query, query_row, head) + chunk * 8);
      for (int k = 0; k < 4; ++k) v.word[k] ^= signs;
    }
    queries.store_vector(Row::at(row, chunk), v);
  }
}

// The 16 rows of an item, and their sums over the tiles of one warp.
//
// Registers of a lane: rows lane / 4 and lane / 4 + 8 of S (2 fragments) and of O (kValueDim / 8 fragments).
template <typename Tile, typename ScoreOptions>
class DecodeRows {
  using T = typename Tile::Element;
  using KeyRow = typename Tile::KeyRow;
  using ValueRow = typename Tile::ValueRow;

 public:
  using Options = ScoreOptions;

  PC_MEMBER explicit DecodeRows(const Shared<pc_uint8>& shared)
      : queries_(shared + Tile::kRing.queries_begin()),
        score_rows_((shared + Tile::kRing.score_rows_begin()).template as<ScoreRow>()) {}

  // Loads the item's queries, and the keys and biases of its rows, into shared memory. A barrier of the block must
  // follow.
  PC_MEMBER void load(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                      bool negate) {
    load_queries<Tile>(p, heads, item, negate, queries_);
    begin(p, heads, sequence, item);
  }

  // The part of load() after the queries.
  PC_MEMBER void begin(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence,
                       const PcWorkItem& item) {
    if (pc_thread() < Tile::kRing.warp_rows) {
      const int query_row = item.query_begin + pc_thread() / heads.count,
                head = heads.first + pc_thread() % heads.count;
      const bool exists = pc_thread() < item.query_count * heads.count;
      score_rows_.store(pc_thread(), load_score_row<Options>(p, sequence, item, query_row, head, exists));
    }
    common_ = common_keys<Options>(p, sequence, item);
    several_ = item.query_count > 1 || (Options::kTree && p.tree.words != 0);
    softmax_.clear();
    PC_UNROLL
    for (int n = 0; n < Tile::kValueTiles; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0f;
    }
  }

  // S = Q K^T of one tile, keys `token` .. token + 15, masked.
  PC_MEMBER void score(const PcAttentionParams& p, const ScoreRule& rule, const Shared<pc_uint8>& keys, int token) {
    multiply(keys);
    transform(p, rule, token);
  }

  // S = Q K^T, neither transformed nor masked.
  PC_MEMBER void multiply(const Shared<pc_uint8>& keys) {
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) s_[n][i] = 0.0f;
    }
    // Matrices of an ldmatrix: of queries, rows 0-7 and 8-15 of two chunks of 8 dims; of keys, two chunks of rows 0-7
    // and of rows 8-15.
    const int key = pc_lane() % 8 + pc_lane() / 16 * 8, chunk = pc_lane() / 8 % 2;  // fault: key_matrices
    const SharedAddress first_query = queries_.address(KeyRow::at(pc_lane() % 16, pc_lane() / 16));
    const SharedAddress first = keys.address(KeyRow::at(key, chunk));
    PC_UNROLL
    for (int k = 0; k < Tile::kKeySteps; ++k) {
      pc_uint32 q[4], b[4];
      pc_load_matrices(q, KeyRow::right_of(first_query, 2 * k));
      pc_load_matrices(b, KeyRow::right_of(first, 2 * k));
      pc_multiply<T>(s_[0], q, b[0], b[1]);
      pc_multiply<T>(s_[1], q, b[2], b[3]);
    }
  }

  PC_MEMBER void transform(const PcAttentionParams& p, const ScoreRule& rule, int token) {
    edge_ = token < common_.begin || token + Tile::kTokens > common_.end;
    if (Options::kFull || edge_) {
      const ScoreRow rows[2] = {score_rows_.load(pc_lane() / 4), score_rows_.load(pc_lane() / 4 + 8)};
      transform_scores<Options>(p, rule, rows, token + 2 * (pc_lane() % 4), edge_, s_);
    }
  }

  // Replaces the scores by weights, and rescales O if a row has a new largest score.
  PC_MEMBER void softmax(float factor) {
    float rescale[2];
    update_softmax(factor, softmax_, s_, rescale);
    this->rescale(rescale);
  }

  // O += P V of the tile.
  PC_MEMBER void accumulate(const PcAttentionParams& p, const Shared<pc_uint8>& values, int token) {
    pc_uint32 weights[4];
    pack_weights<T>(s_[0], s_[1], weights);
    if ((edge_ && several_) || (Options::kFull && masks_all_keys(p))) accumulate_not_finite(p, values, token);
    // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
    const SharedAddress first = values.address(ValueRow::at(pc_lane() % 16, pc_lane() / 16));
    PC_UNROLL
    for (int n = 0; n < Tile::kValueTiles / 2; ++n) {
      pc_uint32 b[4];
      pc_load_matrices_transposed(b, ValueRow::right_of(first, 2 * n));
      pc_multiply<T>(o_[2 * n], weights, b[0], b[1]);
      pc_multiply<T>(o_[2 * n + 1], weights, b[2], b[3]);
    }
  }

  // Adds up the sums of the lanes of each row.
  PC_MEMBER void complete() { complete_softmax(softmax_); }
  // The largest score of row r, 0 or 1, of the lane, and the sum relative to it.
  PC_MEMBER float top(int r) const { return softmax_.top[r]; }
  PC_MEMBER float sum(int r) const { return softmax_.sum[r]; }
  // Dim 8 * n + 2 * (lane % 4) of row r, and the dim after it.
  PC_MEMBER float low(int n, int r) const { return o_[n][2 * r]; }
  PC_MEMBER float high(int n, int r) const { return o_[n][2 * r + 1]; }

 protected:
  PC_MEMBER void rescale(const float (&factors)[2]) {
    // Most tiles have no score above those before.
    if (pc_ballot(factors[0] != 1.0f || factors[1] != 1.0f) == 0) return;
    PC_UNROLL
    for (int n = 0; n < Tile::kValueTiles; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o_[n][i] *= factors[i / 2];  // fault: rescale_by_the_other_row
    }
  }

  Shared<pc_uint8> queries_;
  Shared<ScoreRow> score_rows_;
  KeyRange common_;
  bool several_;  // queries, or the tree leaves out keys
  bool edge_;     // of the tile: not all rows attend to all of its keys
  Softmax softmax_;
  float s_[2][4];  // scores, then weights
  float o_[Tile::kValueTiles][4];

 private:
  // Returns a bit for each key of the tile with an infinite or NaN value.
  PC_MEMBER static int find_not_finite(const Shared<pc_uint8>& values) {
    int found = 0;
    for (int i = 0; i < Tile::kTokens * ValueRow::kChunks / 32; ++i) {
      const pc_vector v = values.load_vector((i * 32 + pc_lane()) * 16);
      for (int k = 0; k < 4; ++k) {
        if (is_not_finite<T>(v.word[k])) found |= 1 << (i * 32 + pc_lane()) / ValueRow::kChunks;
      }
    }
    return or_of_warp(found);
  }

  // Adds the contributions of these keys to the rows that attend to them, and replaces their values by zeros.
  PC_MEMBER void accumulate_not_finite(const PcAttentionParams& p, const Shared<pc_uint8>& values, int token) {
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
        for (int n = 0; n < Tile::kValueTiles; ++n) {
          const pc_uint32 pair = values.template as<pc_uint32>().load(ValueRow::at(t, n) / 4 + pc_lane() % 4);
          o_[n][2 * r] = pc_fma(weight, low_of<T>(pair), o_[n][2 * r]);
          o_[n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o_[n][2 * r + 1]);
        }
      }
      pc_sync_warp();
      if (pc_lane() < ValueRow::kChunks) values.store_vector(ValueRow::at(t, pc_lane()), {{0, 0, 0, 0}});
    }
    pc_sync_warp();
  }
};

// The exchange of sums between the warps at the end of an item: largest scores (factor included) and sums, and O in the
// stage of each ring that was used last.
//
// A row of O has its groups of 8 elements permuted by row % 4, so that the stores of a warp have no bank conflict.
template <typename Tile>
class DecodeExchange {
  static constexpr int kRows = Tile::kRing.warp_rows;

 public:
  PC_MEMBER DecodeExchange(const Shared<pc_uint8>& shared, int stage)
      : sums_((shared + Tile::kRing.sums_begin()).template as<float>()),
        o_(shared.template as<float>()),
        stage_(Tile::sums_begin(stage) / 4) {}

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
      for (int n = 0; n < Tile::kValueTiles; ++n) {
        const pc_uint64 low = pc_float_to_bits(rows.low(n, r)), high = pc_float_to_bits(rows.high(n, r));
        // The index at(warp, row, 8 * n + ...), from one base register.
        const int to = (first ^ (8 * n & 24)) + (8 * n & ~24);  // fault: swizzle_of_sums
        o_.template as<pc_uint64>().store(to / 2, low | high << 32);
      }
    }
  }

  // Sums of a row over all warps: the arguments of end_row, and 4 elements of O.
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
    return stage_ + warp * (Tile::kSumsStride / 4) + row * Tile::kValues + (d ^ ((row & 3) << 3));
  }

  Shared<float> sums_, o_;
  int stage_;
};

}  // namespace pagecore
