// Rows of decode.cu over stored formats: the conversion of queries, and the scales of rows.
//
// Weights times the scales of values are halves relative to the units of rows (row_units.cuh). Each warp has units of
// its own for its tiles.
#pragma once

#include "cuda_src/attention/decode/stored.cuh"
#include "cuda_src/attention/softmax/row_units.cuh"

namespace pagecore {

// ---- queries

// Converts the bfloat16 elements of a row, one vector of each lane, to halves, times a power of two for which the
// largest is at least 2^14 and below 2^15. Returns the factor that makes up for it.
PC_DEVICE float narrow_query(pc_vector& v) {
  int largest = 0;
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int low = static_cast<int>(v.word[k] & 0x7fff), high = static_cast<int>(v.word[k] >> 16 & 0x7fff);
    largest = max_of(largest, max_of(low, high));
  }
  PC_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) largest = max_of(largest, pc_shuffle_xor(largest, mask));
  const int exponent = max_of(largest >> 7, 15);  // biased; both powers of two are normal
  const float power = pc_bits_to_float(static_cast<pc_uint32>(268 - exponent) << 23);
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    v.word[k] = pc_pack<pc_half>(low_of<pc_bfloat16>(v.word[k]) * power, high_of<pc_bfloat16>(v.word[k]) * power);
  }
  return pc_bits_to_float(static_cast<pc_uint32>(exponent - 14) << 23);
}

// Loads the queries of an item, and the factor of each row. Rows past the rows of the item, and dims past head_dim,
// become 0. A warp has one row at a time, a lane one chunk.
template <typename Tile>
PC_DEVICE void load_stored_queries(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, bool negate,
                                   const Shared<pc_uint8>& queries, const Shared<float>& factors) {
  using Row = typename Tile::KeyRow;
  const Global<pc_uint16> query(p.query.data);
  const int chunk = pc_lane();
  for (int row = pc_warp(); row < Tile::kRing.warp_rows; row += Tile::kWarps) {
    pc_vector v = {{0, 0, 0, 0}};
    float factor = 1.0f;
    if (row < item.query_count * heads.count && chunk * 8 < p.head_dim) {  // fault: stored_queries_past_dims
      const int query_row = item.query_begin + row / heads.count, head = heads.first + row % heads.count;
      v = query.load_vector(row_offset(p.query, query_row, head) + chunk * 8);
    }
    if (Tile::kIsHalf && p.query_type == PC_BFLOAT16) factor = narrow_query(v);
    for (int k = 0; k < 4; ++k) v.word[k] ^= negate ? 0x80008000u : 0;
    if (chunk < Tile::kChunks) queries.store_vector(Row::at(row, chunk), v);
    if (chunk == 0) factors.store(row, factor);
  }
}

// ---- rows

// The 16 rows of an item, and their sums over the tiles of one warp.
template <typename Tile, typename Options>
class StoredRows : public DecodeRows<Tile, Options> {
  using Base = DecodeRows<Tile, Options>;

 public:
  PC_MEMBER StoredRows(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared)
      : Base(shared), p_(p), factors_((shared + Tile::kFactorsBegin).template as<float>()) {}

  PC_MEMBER void load(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                      bool negate) {
    load_stored_queries<Tile>(p, heads, item, negate, this->queries_, factors_);
    this->begin(p, heads, sequence, item);
    units_.clear();
  }

  PC_MEMBER void score(const PcAttentionParams& p, const ScoreRule& rule, const StoredPart& keys, int token) {
    // The values, which follow the keys in every array, are unpacked while no registers hold scores.
    unpack_part<Tile, 2 * Tile::kTokens, 32>(keys, pc_lane(), typename Tile::Formats());
    pc_sync_warp();  // fault: decode_stored_barrier_after_unpacking
    this->multiply(keys.tile);
    if (Tile::kIsHalf) scale_scores(keys);
    this->transform(p, rule, token);
  }

  // Replaces the scores by weights, and rescales O if a row has a new largest score. Halves with scales of rows are
  // rescaled by accumulate().
  PC_MEMBER void softmax(float factor) {
    if (!has_units()) return Base::softmax(factor);
    update_softmax(factor, this->softmax_, this->s_, rescale_);
  }

  PC_MEMBER void accumulate(const PcAttentionParams& p, const StoredPart& values, int token) {
    if (has_units()) {
      scale_weights(p, values);
      units_.apply(this->s_, rescale_);
      this->rescale(rescale_);
    }
    Base::accumulate(p, values.tile, token);
  }

  PC_MEMBER float low(int n, int r) const { return Base::low(n, r) * (has_units() ? units_.unit(r) : 1.0f); }
  PC_MEMBER float high(int n, int r) const { return Base::high(n, r) * (has_units() ? units_.unit(r) : 1.0f); }

 private:
  PC_MEMBER bool has_units() const { return Tile::kIsHalf && pc_has_row_scale(p_.value.format); }

  // The scale of the lane's column 2 * (lane % 4) + 8 * n + e of the tile.
  PC_MEMBER static float column_scale(const StoredPart& part, int n, int e) {
    const int row = 8 * n + 2 * (pc_lane() % 4) + e;
    return row_scale(part.format, part.scales.template as<pc_uint32>().load(row * (Tile::kScaleBytes / 4))).factor;
  }

  PC_MEMBER void scale_scores(const StoredPart& keys) {
    const float of_rows[2] = {factors_.load(pc_lane() / 4), factors_.load(pc_lane() / 4 + 8)};
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) this->s_[n][i] *= of_rows[i / 2];
    }
    if (!pc_has_row_scale(keys.format)) return;
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      const float scales[2] = {column_scale(keys, n, 0), column_scale(keys, n, 1)};
      PC_UNROLL
      for (int i = 0; i < 4; ++i) this->s_[n][i] *= scales[i % 2];
    }
  }

  // Multiplies the weights, but not their sums, by the scales of values. A key that a row does not attend to has a
  // weight of 0, which must remain 0 if the scale is NaN.
  PC_MEMBER void scale_weights(const PcAttentionParams& p, const StoredPart& values) {
    const bool masks = (this->edge_ && this->several_) || (Options::kFull && masks_all_keys(p));
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      const float scales[2] = {column_scale(values, n, 0), column_scale(values, n, 1)};
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!masks || this->s_[n][i] != 0.0f) this->s_[n][i] *= scales[i % 2];
      }
    }
  }

  const PcStoredAttentionParams& p_;
  Shared<float> factors_;  // of the 16 rows of the item
  typename Tile::Units units_;
  float rescale_[2];  // of O, from softmax() to accumulate()
};

}  // namespace pagecore
