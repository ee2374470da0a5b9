// The rows of an item of general.cu: their queries, the sums of a warp, and the exchange of sums between warps.
#pragma once

#include "cuda_src/attention/general/ring.cuh"
#include "cuda_src/attention/softmax/splits.cuh"

namespace pagecore {

// Transposes and adds: each of kCount lanes holds kCount numbers, and lane l returns the sum of number l % kCount over
// the kCount lanes. In each step a lane keeps half of its numbers and sends the other half to its partner.
template <int kCount, int kTotal>
PC_DEVICE float exchange_sums(float (&x)[kTotal]) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (pc_lane() & kHalf) != 0;
    PC_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const float sent = upper ? x[i] : x[i + kHalf];
      const float kept = upper ? x[i + kHalf] : x[i];  // fault: keep_the_wrong_half
      x[i] = kept + pc_shuffle_xor(sent, kHalf);
    }
    return exchange_sums<kHalf>(x);
  }
}

// The rows of an item that a warp processes, in quads of 4, and their sums over the tiles that the warp processed.
//
// Registers of a lane: the dims Tile::dim(v) of O for every row, and one score of each quad.
template <int kDim, typename Options>
class GeneralRows {
  using Tile = GeneralTile<kDim>;

 public:
  PC_MEMBER explicit GeneralRows(const Shared<pc_uint8>& shared)
      : score_rows_((shared + Tile::kRing.score_rows_begin()).template as<ScoreRow>()),
        queries_((shared + Tile::kRing.queries_begin()).template as<float>()),
        weights_((shared + (Tile::kRing.weights_begin() + pc_warp() * Tile::kRing.weight_bytes)).template as<float>()) {
  }

  // Loads the block's queries, and the keys and biases of its rows, into shared memory. A barrier of the block must
  // follow.
  PC_MEMBER void load(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                      const GeneralBlock<kDim>& block, bool negate) {
    const int rows = block.rows(item), whole_quads = ceil_div(rows, 4) * 4;
    for (int at = pc_thread(); at < whole_quads * kDim; at += pc_num_threads()) {
      const int row = at / kDim, d = at % kDim, packed = block.first_row + row;
      const int query_row = item.query_begin + packed / heads.count, head = heads.first + packed % heads.count;
      float x = 0.0f;
      if (row < rows && d < p.head_dim) {
        x = load_float(p.query_type, p.query.data, row_offset(p.query, query_row, head) + d);
      }
      queries_.store(at, negate ? -x : x);
    }
    for (int row = pc_thread(); row < rows; row += pc_num_threads()) {
      const int packed = block.first_row + row;
      score_rows_.store(row, load_score_row<Options>(p, sequence, item, item.query_begin + packed / heads.count,
                                                     heads.first + packed % heads.count, true));
    }
    common_ = common_keys<Options>(p, sequence, item);
    positions_.open(p, sequence);
    const Teams teams = block.teams(rows);
    sharers_ = teams.warps;
    first_row_ = teams.first_row(pc_warp());
    num_rows_ = clamp(rows - first_row_, 0, teams.rows);
    clear();
  }

  PC_MEMBER void clear() {
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      top_[quad] = -pc_infinity();
      sum_[quad] = 0.0f;
    }
    PC_UNROLL
    for (int r = 0; r < Tile::kRows; ++r) {
      PC_UNROLL
      for (int i = 0; i < 4 * Tile::kVectors; ++i) o_[r][i] = 0.0f;
    }
  }

  PC_MEMBER bool has_rows() const { return num_rows_ > 0; }
  PC_MEMBER int sharers() const { return sharers_; }

  // Weights of one tile, keys `token` .. token + 7: S = Q K^T and its softmax, one quad of rows at a time.
  PC_MEMBER void compute_weights(const PcAttentionParams& p, const ScoreRule& rule, const Shared<pc_uint8>& keys,
                                 int token) {
    const bool edge = token < common_.begin || token + Tile::kTokens > common_.end;
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      if (4 * quad >= num_rows_) continue;
      const float product = multiply(quad, keys);
      softmax(quad, p, rule, product, token, edge);
    }
    pc_sync_warp();  // fault: general_barrier_before_weights
  }

  // O += P V of the tile. A negative weight marks a key that the row does not attend to; its value may be anything.
  PC_MEMBER void accumulate(const Shared<pc_uint8>& values) {
    for (int t = 0; t < Tile::kOwnTokens; ++t) {
      const int token = t * Tile::kParts + Tile::part();
      float v[Tile::kVectors][4];
      PC_UNROLL
      for (int i = 0; i < Tile::kVectors; ++i) {
        load_floats(values.template as<float>(), token * kDim + Tile::dim(i), v[i]);
      }
      PC_UNROLL
      for (int quad = 0; quad < Tile::kQuads; ++quad) {
        if (4 * quad >= num_rows_) break;
        const pc_vector weights = weights_.load_vector(quad * 32 + token * 4);
        PC_UNROLL
        for (int r = 0; r < 4; ++r) {
          const float weight = pc_bits_to_float(weights.word[r]);
          if (weight < 0.0f) continue;
          PC_UNROLL
          for (int i = 0; i < 4 * Tile::kVectors; ++i) {
            o_[4 * quad + r][i] = pc_fma(weight, v[i / 4][i % 4], o_[4 * quad + r][i]);
          }
        }
      }
    }
    pc_sync_warp();  // fault: general_barrier_after_weights
  }

  // Stores the warp's sums, for the exchange with the warps that share its rows: largest scores (factor included) and
  // sums, and O as [rows, kDim].
  PC_MEMBER void store(const Shared<float>& sums, const Shared<float>& o, float factor) {
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      if (4 * quad >= num_rows_) break;
      const float sum = over_tokens<false>(sum_[quad]);
      if (token_of_lane() == 0) {
        sums.store(2 * (4 * quad + row_of_lane()), top_[quad] * factor);
        sums.store(2 * (4 * quad + row_of_lane()) + 1, sum);
      }
      PC_UNROLL
      for (int r = 4 * quad; r < 4 * quad + 4; ++r) {
        PC_UNROLL
        for (int v = 0; v < Tile::kVectors; ++v) {
          pc_vector four;
          PC_UNROLL
          for (int i = 0; i < 4; ++i) {
            float x = o_[r][4 * v + i];
            if (Tile::kParts == 2) x += pc_shuffle_xor(x, 16);
            four.word[i] = pc_float_to_bits(x);
          }
          if (Tile::part() == 0) o.store_vector(r * kDim + Tile::dim(v), four);
        }
      }
    }
  }

 private:
  // The row and the token of the score that a lane has of each quad.
  PC_MEMBER static int row_of_lane() { return pc_lane() % Tile::kLanes / Tile::kOwnTokens; }
  PC_MEMBER static int token_of_lane() { return pc_lane() % Tile::kOwnTokens * Tile::kParts + Tile::part(); }

  // Returns the sum or the maximum over a row's 8 tokens.
  template <bool kLargest>
  PC_MEMBER static float over_tokens(float x) {
    PC_UNROLL
    for (int n = 1; n < 8; n *= 2) {
      const float other = pc_shuffle_xor(x, n < Tile::kOwnTokens ? n : 16);
      x = kLargest ? pc_max(x, other) : x + other;
    }
    return x;
  }

  PC_MEMBER static void load_floats(const Shared<float>& source, int at, float (&x)[4]) {
    const pc_vector four = source.load_vector(at);
    PC_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = pc_bits_to_float(four.word[i]);
  }

  // Returns the lane's product of a quad: row row_of_lane() with token token_of_lane(). A lane multiplies its dims of 4
  // rows and kOwnTokens tokens; the sums over dims are then exchanged between lanes.
  PC_MEMBER float multiply(int quad, const Shared<pc_uint8>& keys) const {
    float s[4 * Tile::kOwnTokens];
    PC_UNROLL
    for (int i = 0; i < 4 * Tile::kOwnTokens; ++i) s[i] = 0.0f;
    PC_UNROLL
    for (int v = 0; v < Tile::kVectors; ++v) {
      float q[4][4];
      PC_UNROLL
      for (int r = 0; r < 4; ++r) load_floats(queries_, (first_row_ + 4 * quad + r) * kDim + Tile::dim(v), q[r]);
      PC_UNROLL
      for (int t = 0; t < Tile::kOwnTokens; ++t) {
        float k[4];
        load_floats(keys.template as<float>(), (t * Tile::kParts + Tile::part()) * kDim + Tile::dim(v), k);
        PC_UNROLL
        for (int r = 0; r < 4; ++r) {
          PC_UNROLL
          for (int i = 0; i < 4; ++i) s[r * Tile::kOwnTokens + t] = pc_fma(q[r][i], k[i], s[r * Tile::kOwnTokens + t]);
        }
      }
    }
    return exchange_sums<Tile::kLanes>(s);
  }

  // Transforms and masks the lane's score of a quad, stores its weight, and rescales O if a row has a new largest
  // score.
  PC_MEMBER void softmax(int quad, const PcAttentionParams& p, const ScoreRule& rule, float score, int token,
                         bool edge) {
    const int j = token + token_of_lane();
    bool attended = 4 * quad + row_of_lane() < num_rows_;
    if (Options::kFull || edge) {
      const ScoreRow row = score_rows_.load(first_row_ + min_of(4 * quad + row_of_lane(), num_rows_ - 1));
      const int position = Options::kSelected && !row.keys.has(j) ? 0 : positions_.position(p, j);
      score = transform_score<Options>(rule, row, score, position);
      attended = attended && attends<Options>(p, row, j, position);
    }
    if (!attended) score = -pc_infinity();

    const float top = pc_max(top_[quad], over_tokens<true>(score));
    const float origin = -rule.factor * finite_or_zero(top);
    // Exactly 1 if `top` did not change: factor * top - round(factor * top) is not 0.
    const float rescale = top == top_[quad] ? 1.0f : pc_exp2(pc_fma(rule.factor, top_[quad], origin));
    const float weight = pc_exp2(pc_fma(rule.factor, score, origin));
    top_[quad] = top;
    sum_[quad] = pc_fma(sum_[quad], rescale, weight);
    weights_.store(quad * 32 + token_of_lane() * 4 + row_of_lane(), attended ? weight : -1.0f);
    // Most tiles have no score above those before.
    if (pc_ballot(rescale != 1.0f) == 0) return;
    PC_UNROLL
    for (int r = 0; r < 4; ++r) {
      const float own = pc_shuffle(rescale, r * Tile::kOwnTokens);
      PC_UNROLL
      for (int i = 0; i < 4 * Tile::kVectors; ++i) o_[4 * quad + r][i] *= own;
    }
  }

  Shared<ScoreRow> score_rows_;
  Shared<float> queries_, weights_;
  KeyRange common_;
  NumberedKeys<Options::kSelected> positions_;
  int sharers_;    // warps of the team
  int first_row_;  // of the warp, among the block's rows
  int num_rows_;
  float top_[Tile::kQuads];  // largest score of the lane's row of each quad
  float sum_[Tile::kQuads];  // of the lane's own tokens only
  float o_[Tile::kRows][4 * Tile::kVectors];
};

// The exchange of sums between the warps at the end of an item, or of a piece of an item.
template <int kDim>
class GeneralExchange {
  using Tile = GeneralTile<kDim>;

 public:
  PC_MEMBER GeneralExchange(const Shared<pc_uint8>& shared, int stage)
      : sums_((shared + Tile::kRing.sums_begin()).template as<float>()),
        o_((shared + stage * Tile::kRing.stage_bytes).template as<float>()) {}

  PC_MEMBER Shared<float> sums(int warp) const { return sums_ + warp * Tile::kRows * 2; }
  PC_MEMBER Shared<float> o(int warp) const { return o_ + warp * (Tile::kRing.ring_bytes() / 4); }

  // Sums of a row over the warps that share it: the arguments of end_row, and N elements of O.
  template <int N>
  struct Sums {
    float top, sum;
    float x[N];
  };

  template <int N>
  PC_MEMBER Sums<N> load(int row, int d, const Teams& teams) const {
    const int first = row / teams.rows * teams.warps, own = row % teams.rows;
    Sums<N> all = no_sums<N>();
    for (int w = first; w < first + teams.warps; ++w) all.top = pc_max(all.top, sums(w).load(2 * own));
    const float origin = finite_or_zero(all.top);
    for (int w = first; w < first + teams.warps; ++w) {
      const float weight = pc_exp2(sums(w).load(2 * own) - origin);
      all.sum = pc_fma(weight, sums(w).load(2 * own + 1), all.sum);
      PC_UNROLL
      for (int k = 0; k < N; ++k) all.x[k] = pc_fma(weight, o(w).load(own * kDim + d + k), all.x[k]);
    }
    return all;
  }

  template <int N>
  PC_MEMBER static Sums<N> no_sums() {
    Sums<N> all;
    all.top = -pc_infinity();
    all.sum = 0.0f;
    PC_UNROLL
    for (int k = 0; k < N; ++k) all.x[k] = 0.0f;
    return all;
  }

 private:
  Shared<float> sums_, o_;
};

}  // namespace pagecore
