// The rows of an item of latent.cu: their queries and sums in registers, the exchange of scores, and the results.
#pragma once

#include "cuda_src/latent/attention/fold.cuh"
#include "cuda_src/latent/attention/ring.cuh"

namespace pagecore {

// A lane of a warp has rows lane / 4 and lane / 4 + 8 of the 16 rows of its group.
template <typename Tile>
class LatentRows {
  using T = typename Tile::Element;
  static constexpr PcLatentShape kShape = Tile::kShape;
  static constexpr int kParts = Tile::kParts;

 public:
  PC_MEMBER explicit LatentRows(const Shared<pc_uint8>& shared)
      : products_((shared + kShape.products_begin()).template as<float>()),
        ranges_((shared + kShape.ranges_begin()).template as<KeyRange>()),
        folds_((shared + kShape.folds_begin()).template as<float>()) {}

  // Loads the queries of an item into registers, and the keys of its rows into shared memory. A barrier of the block
  // must come between this and the last use of these keys before, and between this and their first use.
  PC_MEMBER void open(const PcLatentParams& params, const LatentBlock& block, const Sequence& sequence,
                      const PcWorkItem& item, bool negate) {
    const PcAttentionParams& p = params.attention;
    num_rows_ = block.num_rows(item);
    if (pc_thread() < Tile::kRows) {
      KeyRange keys =
          item_keys<Latent>(p, sequence, item, sequence.position(item.query_begin + block.query(pc_thread())));
      if (pc_thread() >= num_rows_) keys.end = keys.begin;
      ranges_.store(pc_thread(), keys);
    }
    common_ = common_keys<Latent>(p, sequence, item);
    several_ = item.query_count > 1;
    load_queries(params, block, item, negate ? 0x80008000u : 0);
  }

  PC_MEMBER void clear() {
    softmax_.clear();
    PC_UNROLL
    for (int n = 0; n < 2 * Tile::kValueSteps; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0f;
    }
  }

  // Multiplies the warp's dims of its rows and of the keys of a tile, and stores the parts of scores.
  PC_MEMBER void multiply(const Shared<pc_uint8>& tile) const {
    if (!has_rows()) return;
    // Matrices of an ldmatrix: two chunks of keys 0-7, and of keys 8-15.
    const int key = pc_lane() % 8 + pc_lane() / 16 * 8, chunk = 2 * Tile::part() + pc_lane() / 8 % 2;
    const SharedAddress first = tile.address(Tile::at(key, chunk));
    float s[2][2][4];  // even and odd steps apart: an instruction waits for the one before with the same sums
    PC_UNROLL
    for (int i = 0; i < 4; ++i) s[0][0][i] = s[0][1][i] = s[1][0][i] = s[1][1][i] = 0.0f;
    PC_UNROLL
    for (int k = 0; k < Tile::kSteps; ++k) {
      pc_uint32 b[4];
      pc_load_matrices(b, first + 128 * k);
      pc_multiply<T>(s[k % 2][0], q_[k], b[0], b[1]);
      pc_multiply<T>(s[k % 2][1], q_[k], b[2], b[3]);
    }
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      pc_vector v;
      PC_UNROLL
      for (int i = 0; i < 4; ++i) v.word[i] = pc_float_to_bits(s[0][n][i] + s[1][n][i]);
      products_.store_vector(product_at(Tile::part(), n), v);
    }
  }

  // Adds up the parts of scores, replaces them by weights, and adds the weighted values of the tile to O. Every warp of
  // a group computes the same weights.
  PC_MEMBER void attend(const PcLatentParams& params, float factor, const Shared<pc_uint8>& tile,
                        const Shared<pc_uint8>& listed, int token) {
    if (!has_rows()) return;
    const bool edge = token < common_.begin || token + Tile::kTokens > common_.end;
    float s[2][4];
    add_products(s);
    if (edge) mask_ranges(token, s);
    if (params.sparse != 0) mask_listed(listed, s);
    float rescale[2];
    update_softmax(factor, softmax_, s, rescale);
    // Most tiles have no score above those before.
    if (pc_ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0) {
      PC_UNROLL
      for (int n = 0; n < 2 * Tile::kValueSteps; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) o_[n][i] *= rescale[i / 2];  // fault: latent_rescale
      }
    }
    if (edge && several_ && has_not_finite(tile)) {
      accumulate_by_rows(token, tile, s);
    } else {
      accumulate(tile, s);
    }
  }

  // Writes the rows of item i, after the last key of the item or of a piece: to the output, to the item's partial rows,
  // or to the worker's own partial rows.
  PC_MEMBER void write(const PcLatentParams& params, const LatentBlock& block, int i, float factor,
                       const LatentPiece& piece) {
    const PcAttentionParams& p = params.attention;
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    complete_softmax(softmax_);
    PC_UNROLL
    for (int r = 0; r < 2; ++r) write_row(params, block, item, splits, factor, piece, r);
  }

 private:
  PC_MEMBER static int row_of(int r) { return 16 * Tile::group() + pc_lane() / 4 + 8 * r; }
  PC_MEMBER bool has_rows() const { return 16 * Tile::group() < num_rows_; }
  // The warp's dim of O in fragment n, and the dim after it.
  PC_MEMBER static int dim_of(int n) { return n / 2 * 64 + 16 * Tile::part() + n % 2 * 8 + 2 * (pc_lane() % 4); }
  PC_MEMBER static int product_at(int part, int n) {
    return ((part * Tile::kGroups + Tile::group()) * 2 + n) * 128 + 4 * pc_lane();
  }

  PC_MEMBER void load_queries(const PcLatentParams& params, const LatentBlock& block, const PcWorkItem& item,
                              pc_uint32 signs) {
    const PcAttentionParams& p = params.attention;
    PC_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const bool exists = row < num_rows_;
      const int query_row = item.query_begin + block.query(row), head = block.head(row);
      const int first = 16 * Tile::part() + 2 * (pc_lane() % 4);
      const pc_int64 latent_at = row_offset(p.query, query_row, head) + first;
      const pc_int64 rope_at = row_offset(params.query_rope, query_row, head) + first;
      const Global<pc_uint32> latent(p.query.data), rope(params.query_rope.data);
      PC_UNROLL
      for (int k = 0; k < Tile::kSteps; ++k) {
        PC_UNROLL
        for (int half = 0; half < 2; ++half) {
          pc_uint32 pair = 0;
          if (exists) {
            pair = k < Tile::kValueSteps ? latent.load((latent_at + 64 * k + 8 * half) / 2)
                                         : rope.load((rope_at + 8 * half) / 2);
          }
          pair ^= exists ? signs : 0;
          q_[k][2 * half + r] = pair;
        }
      }
    }
  }

  PC_MEMBER void add_products(float (&s)[2][4]) const {
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
      PC_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const pc_vector v = products_.load_vector(product_at(part, n));
        PC_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] += pc_bits_to_float(v.word[i]);
      }
    }
  }

  PC_MEMBER KeyRange range_of(int r) const { return ranges_.load(row_of(r)); }

  PC_MEMBER void mask_ranges(int token, float (&s)[2][4]) const {
    const KeyRange ranges[2] = {range_of(0), range_of(1)};
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!ranges[i / 2].has(token + 8 * n + 2 * (pc_lane() % 4) + i % 2)) s[n][i] = -pc_infinity();
      }
    }
  }

  PC_MEMBER static void mask_listed(const Shared<pc_uint8>& listed, float (&s)[2][4]) {
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      const pc_uint32 two = listed.template as<pc_uint16>().load(4 * n + pc_lane() % 4);
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        if ((two >> 8 * (i % 2) & 1) == 0) s[n][i] = -pc_infinity();
      }
    }
  }

  // Matrices of an ldmatrix: keys 0-7 and 8-15, of the warp's two chunks of every 64 dims.
  PC_MEMBER static SharedAddress first_value(const Shared<pc_uint8>& tile) {
    return tile.address(Tile::at(pc_lane() % 16, 2 * Tile::part() + pc_lane() / 16));
  }

  PC_MEMBER void accumulate(const Shared<pc_uint8>& tile, const float (&s)[2][4]) {
    pc_uint32 weights[4];
    pack_weights<T>(s[0], s[1], weights);
    const SharedAddress first = first_value(tile);
    PC_UNROLL
    for (int j = 0; j < Tile::kValueSteps; ++j) {
      pc_uint32 b[4];
      pc_load_matrices_transposed(b, first + 128 * j);
      pc_multiply<T>(o_[2 * j], weights, b[0], b[1]);
      pc_multiply<T>(o_[2 * j + 1], weights, b[2], b[3]);
    }
  }

  // Returns true if one of the warp's values of a tile is infinite or NaN: 0 times such a value is NaN, so that it
  // would reach rows that do not attend to it.
  PC_MEMBER static bool has_not_finite(const Shared<pc_uint8>& tile) {
    const SharedAddress first = first_value(tile);
    bool found = false;
    PC_NO_UNROLL
    for (int j = 0; j < Tile::kValueSteps; ++j) {
      pc_uint32 b[4];
      pc_load_matrices_transposed(b, first + 128 * j);
      for (int k = 0; k < 4; ++k) found = found || is_not_finite<T>(b[k]);
    }
    return pc_ballot(found) != 0;
  }

  // Adds the weighted values of each key to the rows that attend to it, without matrix instructions.
  PC_MEMBER void accumulate_by_rows(int token, const Shared<pc_uint8>& tile, const float (&s)[2][4]) {
    PC_NO_UNROLL
    for (int t = 0; t < Tile::kTokens; ++t) {
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float even = t < 8 ? s[0][2 * r] : s[1][2 * r], odd = t < 8 ? s[0][2 * r + 1] : s[1][2 * r + 1];
        const float weight = pc_shuffle(t % 2 == 0 ? even : odd, pc_lane() / 4 * 4 + t % 8 / 2);
        if (!range_of(r).has(token + t)) continue;
        PC_UNROLL
        for (int n = 0; n < 2 * Tile::kValueSteps; ++n) {
          const int chunk = n / 2 * 8 + 2 * Tile::part() + n % 2;
          const pc_uint32 pair = tile.template as<pc_uint32>().load(Tile::at(t, chunk) / 4 + pc_lane() % 4);
          o_[n][2 * r] = pc_fma(weight, low_of<T>(pair), o_[n][2 * r]);
          o_[n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o_[n][2 * r + 1]);
        }
      }
    }
  }

  PC_MEMBER void write_row(const PcLatentParams& params, const LatentBlock& block, const PcWorkItem& item,
                           const Splits& splits, float factor, const LatentPiece& piece, int r) {
    const PcAttentionParams& p = params.attention;
    const int row = row_of(r);
    if (row >= num_rows_) return;
    const bool stores = Tile::part() == 0 && pc_lane() % 4 == 0;
    const LatentRowEnd end(params, block, item, splits, piece, row, softmax_.top[r] * factor, softmax_.sum[r], folds_,
                           Tile::kRows, stores);
    PC_UNROLL
    for (int n = 0; n < 2 * Tile::kValueSteps; ++n) {
      const int d = dim_of(n);
      const pc_uint64 pair = end.has_before() ? Global<pc_uint64>(p.partial_out).load((end.kept + d) / 2) : 0;
      store_pair(end.target.type, end.target.data, end.target.first + d,
                 end.value(o_[n][2 * r], pc_bits_to_float(static_cast<pc_uint32>(pair))),
                 end.value(o_[n][2 * r + 1], pc_bits_to_float(static_cast<pc_uint32>(pair >> 32))));
    }
    if (stores) end.target.store_lse(end.lse);
  }

  // Stores two adjacent elements; the index is even.
  PC_MEMBER static void store_pair(PcFloat type, pc_address data, pc_int64 i, float low, float high) {
    if (type == PC_FLOAT32) {
      const pc_uint64 first = pc_float_to_bits(low), second = pc_float_to_bits(high);
      Global<pc_uint64>(data).store(i / 2, first | second << 32);
    } else {
      Global<pc_uint32>(data).store(i / 2, pc_pack<T>(low, high));
    }
  }

  Shared<float> products_;
  Shared<KeyRange> ranges_;
  Shared<float> folds_;
  KeyRange common_;
  int num_rows_;
  bool several_;  // queries
  Softmax softmax_;
  pc_uint32 q_[Tile::kSteps][4];
  float o_[2 * Tile::kValueSteps][4];
};

}  // namespace pagecore
