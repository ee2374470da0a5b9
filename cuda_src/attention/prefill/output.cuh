// Results of prefill.cu: the output, partial rows of a split, or the sums that the next piece of a folded item
// continues.
#pragma once

#include "cuda_src/attention/prefill/sums.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// The given factor of the values of a key head, by a choice: with a product, instances for sm_100a spill.
PC_DEVICE float choose_value_scale(const PcAttentionParams& p, int kv_head) {
  return load_or(p.value_scale, p.value_scale_stride == 0 ? 0 : kv_head, 1.0f);
}

// The end of a warp's rows, after the last key of an item or of a piece.
template <typename Tile>
class PrefillOutput {
  using T = typename Tile::Element;
  using Row = typename Tile::KeyRow;
  using Sums = PrefillSums<Tile>;
  static constexpr bool kStoresCodes = !IsSame<T, pc_half>::kValue;  // halves have no registers for it
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kDimTiles = Tile::kValueTiles;

 public:
  // `factor`: ScoreRule::factor.
  PC_MEMBER PrefillOutput(const Shared<pc_uint8>& shared, float factor)
      : shared_(shared), folded_((shared + Tile::kShape.sums_begin()).template as<float>()), factor_(factor) {}

  // Writes the rows of an item that is a whole tile to the output.
  PC_MEMBER void store_whole(const PcAttentionParams& p, const Heads& heads, const PrefillQueries& item,
                             Sums& sums) const {
    const float value_scale = choose_value_scale(p, heads.kv);
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(sums.softmax[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const RowPosition at = position_of(heads, item, m, r);
        const float sink = at.exists ? load_sink(p, at.head) : -pc_infinity();
        const RowEnd end = end_row(sums.softmax[m].top[r] * factor_, sums.softmax[m].sum[r], sink);
        if (at.exists && pc_lane() % 4 == 0) store_lse(p, at.query_row, at.head, end.lse);
        sums.scale_row(m, r, end.factor * value_scale);
        gather_row(p, sums, m, r);
      }
    }
    store_rows(p, heads, item);
  }

  // Writes the rows of a split to its partial rows.
  PC_MEMBER void store_part(const PcAttentionParams& p, const Heads& heads, const PrefillQueries& item,
                            Sums& sums) const {
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(sums.softmax[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const RowPosition at = position_of(heads, item, m, r);
        if (!at.exists) continue;
        const RowEnd end = end_row(sums.softmax[m].top[r] * factor_, sums.softmax[m].sum[r], -pc_infinity());
        sums.scale_row(m, r, end.factor);
        const pc_int64 row = item.splits.row(at.query);
        if (pc_lane() % 4 == 0) store_partial_lse(p, row, at.head, end.lse);
        store_row(p, partial_offset(p, row, at.head), sums, m, r);
      }
    }
  }

  // Adds a piece of an item that is a whole tile to the sum of the pieces before it: largest lse and sum in shared
  // memory, values in the partial rows that the worker has to itself. The last piece writes the output.
  PC_MEMBER void fold(const PcAttentionParams& p, const Heads& heads, const PrefillQueries& item, bool is_first,
                      bool is_last, Sums& sums) const {
    const int tile_queries = max_of(Tile::kRows / (p.num_query_heads / p.num_kv_heads), 1);
    const pc_int64 own = p.num_partial_rows - (pc_num_blocks_x() - pc_block_x()) * tile_queries;
    const float value_scale = choose_value_scale(p, heads.kv);
    const Global<pc_uint64> partial(p.partial_out);
    float tops[kRowTiles][2], totals[kRowTiles][2];
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      complete_softmax(sums.softmax[m]);
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const RowPosition at = position_of(heads, item, m, r);
        const pc_int64 to = partial_offset(p, own + at.query, at.head);
        const RowEnd piece = end_row(sums.softmax[m].top[r] * factor_, sums.softmax[m].sum[r], -pc_infinity());
        JoinedRow<2> row;
        row.clear();
        if (!is_first) {
          row.top = folded_.load(2 * at.row);
          row.sum = folded_.load(2 * at.row + 1);
        }
        const float top = row.top, sum = row.sum;
        PC_UNROLL
        for (int n = 0; n < kDimTiles; ++n) {
          const float part[2] = {sums.o[m][n][2 * r] * piece.factor, sums.o[m][n][2 * r + 1] * piece.factor};
          row.top = top;
          row.sum = sum;
          const bool kept = !is_first && at.exists && 8 * n < p.value_dim;
          const pc_uint64 pair = partial.load_if(kept, to / 2 + 4 * n + pc_lane() % 4);
          row.x[0] = pc_bits_to_float(static_cast<pc_uint32>(pair));
          row.x[1] = pc_bits_to_float(static_cast<pc_uint32>(pair >> 32));
          row.add(piece.lse, part);
          sums.o[m][n][2 * r] = row.x[0];
          sums.o[m][n][2 * r + 1] = row.x[1];
        }
        if (is_last) {
          const RowEnd end = row.end(at.exists ? load_sink(p, at.head) : -pc_infinity());
          if (at.exists && pc_lane() % 4 == 0) store_lse(p, at.query_row, at.head, end.lse);
          sums.scale_row(m, r, end.factor * value_scale);
          gather_row(p, sums, m, r);
          continue;
        }
        tops[m][r] = row.top;
        totals[m][r] = row.sum;
        if (at.exists) store_row(p, to, sums, m, r);
      }
    }
    if (is_last) return store_rows(p, heads, item);
    pc_sync_warp();  // the four lanes of a row have read the numbers that one of them replaces
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (pc_lane() % 4 != 0) continue;
        folded_.store(2 * row_of(m, r), tops[m][r]);
        folded_.store(2 * row_of(m, r) + 1, totals[m][r]);
      }
    }
    sums.clear();  // the tiles of the next piece have barriers of the block before its fold
  }

 private:
  // Row r, 0 or 1, of the lane in row tile m.
  struct RowPosition {
    int row;  // of the item
    int query;
    int query_row;
    int head;
    bool exists;
  };

  PC_MEMBER static int row_of(int m, int r) { return pc_warp() * Tile::kWarpRows + 16 * m + 8 * r + pc_lane() / 4; }

  PC_MEMBER static RowPosition position_of(const Heads& heads, const PrefillQueries& item, int m, int r) {
    const int row = row_of(m, r);
    const int query = row / heads.count;
    return {row, query, item.work.query_begin + query, heads.first + row % heads.count, row < item.num_rows(heads)};
  }

  PC_MEMBER static pc_int64 partial_offset(const PcAttentionParams& p, pc_int64 row, int head) {
    return (row * p.num_query_heads + head) * p.value_dim;  // fault: pitch_of_partial_rows
  }

  PC_MEMBER void store_row(const PcAttentionParams& p, pc_int64 offset, const Sums& sums, int m, int r) const {
    const Global<pc_uint64> target(p.partial_out);
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const pc_uint64 low = pc_float_to_bits(sums.o[m][n][2 * r]), high = pc_float_to_bits(sums.o[m][n][2 * r + 1]);
      const bool exists = 8 * n < p.value_dim;  // fault: partial_rows_past_dims
      target.store_if(exists, offset / 2 + 4 * n + pc_lane() % 4, low | high << 32);
    }
  }

  // Packs a row of the output into the shared memory of the warp's queries, which are not needed any more, at their
  // pitch. A pair of codes takes the place of a pair of numbers, so that both need the same registers.
  PC_MEMBER void gather_row(const PcAttentionParams& p, const Sums& sums, int m, int r) const {
    if constexpr (kStoresCodes) {
      if (p.out_type == PC_FLOAT8_E4M3) {
        const float factor = load_out_factor(p);
        return gather_pairs(sums, m, r, [=](float low, float high) { return e4m3_pair(low * factor, high * factor); });
      }
    }
    gather_pairs(sums, m, r, [](float low, float high) { return pc_pack<T>(low, high); });
  }

  template <typename Pack>
  PC_MEMBER void gather_pairs(const Sums& sums, int m, int r, Pack pack) const {
    const int first = pc_opaque(Row::at(row_of(m, r), 0) + pc_lane() % 4 * 4);
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const pc_uint32 pair = pack(sums.o[m][n][2 * r], sums.o[m][n][2 * r + 1]);
      const int to = (first ^ ((n & 7) << 4)) + ((n & ~7) << 4);  // Row::at(row, n), from one base register
      shared_.template as<pc_uint32>().store(to / 4, pair);
    }
  }

  // Copies the packed rows to the output.
  PC_MEMBER void store_rows(const PcAttentionParams& p, const Heads& heads, const PrefillQueries& item) const {
    pc_sync_warp();
    const Global<T> out(p.out.data);
    const int end = min_of(Tile::kWarpRows, item.num_rows(heads) - pc_warp() * Tile::kWarpRows);
    constexpr int kChunks = kDimTiles;  // of an output row; chunks past value_dim are padding
    for (int i = pc_lane(); i < end * kChunks; i += 32) {
      const int row = pc_warp() * Tile::kWarpRows + i / kChunks, chunk = i % kChunks;
      if (chunk * 8 >= p.value_dim) continue;  // fault: prefill_output_past_dims
      const pc_int64 to = row_offset(p.out, item.work.query_begin + row / heads.count, heads.first + row % heads.count);
      if (kStoresCodes && p.out_type == PC_FLOAT8_E4M3) {
        store_codes(p.out.data, to + chunk * 8, row, chunk);
      } else {
        out.store_vector(to + chunk * 8, shared_.load_vector(Row::at(row, chunk)));
      }
    }
  }

  // Stores a chunk of eight codes, of which each packed word has two.
  PC_MEMBER void store_codes(pc_address data, pc_int64 to, int row, int chunk) const {
    const Global<pc_uint16> target(data);
    PC_UNROLL
    for (int k = 0; k < 4; ++k) {
      const pc_uint32 pair = shared_.template as<pc_uint32>().load(Row::at(row, chunk) / 4 + k);
      target.store(to / 2 + k, static_cast<pc_uint16>(pair));
    }
  }

  Shared<pc_uint8> shared_;
  Shared<float> folded_;
  float factor_;
};

}  // namespace pagecore
