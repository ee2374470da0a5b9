// Sums of prefill.cu: the online softmax and O of a warp's rows, in registers.
#pragma once

#include "cuda_src/attention/prefill/feed.cuh"

namespace pagecore {

// Registers of a lane: of each row tile of 16 rows, O of rows lane / 4 and lane / 4 + 8, and the weights of one part of
// a tile as left operands of pc_multiply.
template <typename Tile>
struct PrefillSums {
  using T = typename Tile::Element;
  using Row = typename Tile::ValueRow;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kKeyTiles = Tile::kKeyTiles;
  static constexpr int kDimTiles = Tile::kValueTiles;

  Softmax softmax[kRowTiles];
  pc_uint32 weights[kRowTiles][kKeyTiles / 2][4];  // of the part of a tile that `update` was called for last
  float o[kRowTiles][kDimTiles][4];

  PC_MEMBER void clear() {
    PC_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].clear();
      PC_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
      }
    }
  }

  // Replaces the scores of row tile m by weights, and rescales O if a row has a new largest score. `scale` multiplies
  // the weights, but not their sums, by the scales of values, and may change the factors by which O is rescaled.
  template <typename ScaleWeights>
  PC_MEMBER void update(int m, float factor, const ScaleWeights& scale, float (&s)[kKeyTiles][4]) {
    float rescale[2];
    update_softmax(factor, softmax[m], s, rescale);
    scale(s, rescale);
    PC_UNROLL
    for (int k = 0; k < kKeyTiles / 2; ++k) pack_weights<T>(s[2 * k], s[2 * k + 1], weights[m][k]);
    // Most tiles have no score above those before.
    if (pc_ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) == 0) return;
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) o[m][n][i] *= rescale[i / 2];
    }
  }

  // O += P V of the part with these weights; it begins in its tile at `key`.
  PC_MEMBER void accumulate(const Shared<pc_uint8>& shared, int key) {
    // Matrices: keys 0-7 and 8-15, of two chunks of 8 dims each.
    const int lane = Tile::Options::kWholeTile ? pc_opaque(pc_lane()) : pc_lane();
    const SharedAddress first = shared.address(Tile::kShape.values_begin() + Row::at(key + lane % 16, lane / 16));
    PC_UNROLL
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      PC_UNROLL
      for (int n = 0; n < kDimTiles / 2; ++n) {
        pc_uint32 b[4];
        pc_load_matrices_transposed(b, Row::right_of(first, 2 * n) + 16 * k * Row::kBytes);
        PC_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          pc_multiply<T>(o[m][2 * n], weights[m][k], b[0], b[1]);
          pc_multiply<T>(o[m][2 * n + 1], weights[m][k], b[2], b[3]);
        }
      }
    }
  }

  // Adds the contributions of keys with infinite or NaN values to the rows that attend to them: bit t of `found` is key
  // t of the part. Rows that do not attend to such a key have a weight of 0 for it.
  PC_MEMBER void accumulate_not_finite(const Shared<pc_uint8>& shared, typename Tile::PartBits found, int key) {
    for (int t = 0; found != 0; ++t, found >>= 1) {
      if ((found & 1) == 0) continue;
      PC_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        PC_UNROLL
        for (int r = 0; r < 2; ++r) accumulate_key(shared, weight_of(m, r, t), key + t, m, r);
      }
    }
  }

  PC_MEMBER void scale_row(int m, int r, float factor) {
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      o[m][n][2 * r] *= factor;
      o[m][n][2 * r + 1] *= factor;
    }
  }

 private:
  // Returns the weight of key t of the part for row r, 0 or 1, of the lane in row tile m.
  PC_MEMBER float weight_of(int m, int r, int t) const {
    pc_uint32 pair = 0;  // select by masks: indexing an array by a variable would move it to local memory
    PC_UNROLL
    for (int i = 0; i < kKeyTiles; ++i) pair |= weights[m][i / 2][2 * (i % 2) + r] & (i == t / 8 ? 0xffffffffu : 0u);
    pair = static_cast<pc_uint32>(pc_shuffle(static_cast<int>(pair), pc_lane() / 4 * 4 + t % 8 / 2));
    return t % 2 == 0 ? low_of<T>(pair) : high_of<T>(pair);
  }

  PC_MEMBER void accumulate_key(const Shared<pc_uint8>& shared, float weight, int key, int m, int r) {
    if (weight == 0.0f) return;
    PC_UNROLL
    for (int n = 0; n < kDimTiles; ++n) {
      const int at = Tile::kShape.values_begin() + Row::at(key, n);
      const pc_uint32 pair = shared.template as<pc_uint32>().load(at / 4 + pc_lane() % 4);
      o[m][n][2 * r] = pc_fma(weight, low_of<T>(pair), o[m][n][2 * r]);
      o[m][n][2 * r + 1] = pc_fma(weight, high_of<T>(pair), o[m][n][2 * r + 1]);
    }
  }
};

// Returns a bit for each key of the tile with an infinite or NaN value; each warp scans some of the keys. A barrier of
// the block must separate two calls.
template <typename Tile>
PC_DEVICE pc_uint64 find_not_finite(const Shared<pc_uint8>& shared) {
  using Row = typename Tile::ValueRow;
  constexpr int kOwn = Tile::kTokens / Tile::kShape.warps;
  const Shared<pc_uint8> values = shared + (Tile::kShape.values_begin() + pc_warp() * kOwn * Row::kBytes);
  const Shared<int> words = (shared + Tile::kShape.words_begin()).template as<int>();
  int found = 0;
  for (int i = pc_lane(); i < kOwn * Row::kChunks; i += 32) {
    const pc_vector v = values.load_vector(16 * i);
    for (int k = 0; k < 4; ++k) {
      if (is_not_finite<typename Tile::Element>(v.word[k])) found |= 1 << i / Row::kChunks;
    }
  }
  found = or_of_warp(found);
  if (pc_lane() == 0) words.store(pc_warp(), found);
  pc_sync_block();
  pc_uint64 all = 0;
  for (int w = 0; w < Tile::kShape.warps; ++w) all |= static_cast<pc_uint64>(words.load(w)) << w * kOwn;
  return all;
}

// Replaces the values of some keys by zeros: bit t of `found` is key first + t of the tile.
template <typename Tile>
PC_DEVICE void clear_values(const Shared<pc_uint8>& shared, typename Tile::PartBits found, int first) {
  using Row = typename Tile::ValueRow;
  // Opaque, so that the compiler keeps no register for this rare loop during the others.
  for (int i = pc_opaque(pc_thread()); i < Tile::kKeys * Row::kChunks; i += Tile::kThreads) {
    if ((found >> i / Row::kChunks & 1) == 0) continue;
    shared.store_vector(Tile::kShape.values_begin() + first * Row::kBytes + 16 * i, {{0, 0, 0, 0}});
  }
}

}  // namespace pagecore
