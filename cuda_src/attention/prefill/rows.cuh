// The rows of an item of prefill.cu: the keys that they attend to, their scores and the softmax.
#pragma once

#include "cuda_src/attention/prefill/sums.cuh"

namespace pagecore {

// Keys of a warp's rows.
struct alignas(16) WarpSpan {
  KeyRange any;     // keys that at least one row attends to
  KeyRange common;  // keys that all rows attend to
};

static_assert(sizeof(WarpSpan) == 16, "the shape has room for it");

// The scales of a 16-bit cache: there are none in its rows.
struct NoScales {
  struct Units {
    PC_MEMBER void clear() {}
  };
  template <typename Scores>
  PC_MEMBER void scale_scores(int /*key*/, Scores& /*s*/) const {}
  template <typename Scores>
  PC_MEMBER void scale_weights(int /*key*/, bool /*masks*/, Scores& /*s*/, Units& /*units*/,
                               float (& /*rescale*/)[2]) const {}
  template <int kRowTiles, typename Sums>
  PC_MEMBER void drop_units(const Units (& /*units*/)[kRowTiles], Sums& /*sums*/) const {}
};

// A warp's rows of an item. Scores are held for one part of a tile at a time, Tile::kKeys keys. A part begins at token
// `token` of the sequence, which is row `key` of its tile.
// `Scales`: NoScales, or StoredScales (stored.cuh).
template <typename Tile, typename Scales>
class PrefillRows {
  using T = typename Tile::Element;
  using Options = typename Tile::Options;
  using Row = typename Tile::KeyRow;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kKeyTiles = Tile::kKeyTiles;

 public:
  PC_MEMBER PrefillRows(const Shared<pc_uint8>& shared, const ScoreRule& rule, const Scales& scales)
      : scales_(scales),
        shared_(shared),
        ranges_((shared + Tile::kShape.ranges_begin()).template as<KeyRange>()),
        span_((shared + (Tile::kShape.spans_begin() + pc_warp() * 16)).template as<WarpSpan>()),
        rule_(rule) {}

  // Loads the keys and biases of the rows. A barrier of the block must follow.
  PC_MEMBER void load(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item) {
    const int first = pc_warp() * Tile::kWarpRows, num_rows = item.num_rows(heads);
    const int last = min_of(first + Tile::kWarpRows, num_rows) - 1;
    WarpSpan span = {{0, 0}, {0, 0}};
    if (first <= last) {
      const int a = item.sequence.position(item.work.query_begin + first / heads.count);
      const int b = item.sequence.position(item.work.query_begin + last / heads.count);
      const KeyRange early = item_keys<Options>(p, item.sequence, item.work, a);
      const KeyRange late = item_keys<Options>(p, item.sequence, item.work, b);
      span = {{early.begin, late.end}, {late.begin, early.end}};
      if (Options::kTree && p.tree.words != 0) {
        const int base = item.sequence.position(item.sequence.queries_begin);
        span.any.begin = item_keys<Options>(p, item.sequence, item.work, base).begin;
        span.common.end = min_of(early.end, base);
      }
    }
    if (pc_lane() == 0) span_.store(0, span);
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) units_[m].clear();
    if (Options::kFull) {
      rows_[0] = load_row(p, heads, item, first + pc_lane() / 4);
      rows_[1] = load_row(p, heads, item, first + pc_lane() / 4 + 8);
    } else if (pc_lane() < Tile::kWarpRows) {
      ranges_.store(first + pc_lane(), load_row(p, heads, item, first + pc_lane()).keys);
    }
  }

  // Returns true if at least one of the warp's rows attends to a key of the part.
  PC_MEMBER bool attends_to(int token) const {
    const KeyRange any = span_.load(0).any;
    return token < any.end && token + Tile::kKeys > any.begin;
  }

  // S = Q K^T of the part.
  PC_MEMBER void score(int key) {
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      PC_UNROLL
      for (int n = 0; n < kKeyTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) s_[m][n][i] = 0.0f;
      }
    }
    // Matrices of an ldmatrix: of queries, rows 0-7 and 8-15 of two chunks of 8 dims; of keys, two chunks of rows 0-7
    // and of rows 8-15.
    const int lane = Options::kWholeTile ? pc_opaque(pc_lane()) : pc_lane();
    const SharedAddress first_query = shared_.address(Row::at(pc_warp() * Tile::kWarpRows + lane % 16, lane / 16));
    const SharedAddress first_key =
        shared_.address(Tile::kShape.keys_begin() + Row::at(key + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    PC_UNROLL
    for (int k = 0; k < Tile::kKeySteps; ++k) {
      pc_uint32 q[kRowTiles][4];
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        pc_load_matrices(q[m], Row::right_of(first_query, 2 * k) + 16 * m * Row::kBytes);
      }
      PC_UNROLL
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        pc_uint32 b[4];
        pc_load_matrices(b, Row::right_of(first_key, 2 * k) + 16 * n * Row::kBytes);
        PC_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          pc_multiply<T>(s_[m][2 * n], q[m], b[0], b[1]);
          pc_multiply<T>(s_[m][2 * n + 1], q[m], b[2], b[3]);
        }
      }
    }
    scales_.scale_scores(key, s_);
  }

  // Transforms and masks S, and replaces it by weights.
  PC_MEMBER void softmax(const PcAttentionParams& p, int token, PrefillSums<Tile>& sums) {
    const KeyRange common = span_.load(0).common;
    const bool edge = token < common.begin || token + Tile::kKeys > common.end;
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      if (Options::kFull || edge) transform_row_tile(p, m, token, edge);
      const auto scale = [&](float (&s)[kKeyTiles][4], float (&rescale)[2]) {
        const bool masks = edge || (Options::kFull && masks_all_keys(p));
        scales_.scale_weights(token % Tile::kTokens, masks, s, units_[m], rescale);
      };
      sums.update(m, rule_.factor, scale, s_[m]);
    }
  }

  // Multiplies O by the units of the rows.
  PC_MEMBER void drop_units(PrefillSums<Tile>& sums) const { scales_.drop_units(units_, sums); }

 private:
  PC_MEMBER static ScoreRow load_row(const PcAttentionParams& p, const Heads& heads, const PrefillItem& item, int row) {
    return load_score_row<Options>(p, item.sequence, item.work, item.work.query_begin + row / heads.count,
                                   heads.first + row % heads.count, row < item.num_rows(heads));
  }

  PC_MEMBER void transform_row_tile(const PcAttentionParams& p, int m, int token, bool edge) {
    const int first_key = token + 2 * (pc_lane() % 4);
    if constexpr (!Options::kFull) {
      const int row = pc_warp() * Tile::kWarpRows + 16 * m + pc_lane() / 4;
      ScoreRow rows[2];
      rows[0].keys = ranges_.load(row);
      rows[1].keys = ranges_.load(row + 8);
      transform_scores<Options>(p, rule_, rows, first_key, edge, s_[m]);
    } else {
      transform_scores<Options>(p, rule_, rows_, first_key, edge, s_[m]);
    }
  }

  Scales scales_;
  Shared<pc_uint8> shared_;
  Shared<KeyRange> ranges_;
  Shared<WarpSpan> span_;
  ScoreRule rule_;
  ScoreRow rows_[2];
  float s_[kRowTiles][kKeyTiles][4];
  typename Scales::Units units_[kRowTiles];
};

}  // namespace pagecore
