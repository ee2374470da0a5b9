// Scores of the indexer of sparse attention: sum over heads of weight * relu(query . key), times the scale of the key.
//
//   scores^T [64 tokens, heads] = keys [64, dim] . query panel [dim, heads], then a weighted sum over the heads
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_multiply.hpp"
#include "pagecore/ops/cpu/kernels/latent/latent_unpack.hpp"
#include "pagecore/ops/cpu/kernels/simd/math.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

class IndexPass {
 public:
  IndexPass(const IndexScoreArgs& args, const IndexScoreItem& item, float* memory)
      : args_(args),
        item_(item),
        blocks_(args.table.row(item.row)),
        heads_(args.query.num_heads),
        columns_(padded(heads_)),
        width_(pair_padded(args.query.dim)),
        is_e4m3_(args.keys.type == DType::F8E4M3FN),
        pairs_(kHasPairs && args.query.type == Float::BF16 && (is_e4m3_ || args.keys.type == Float::BF16)) {
    carve_latent(reinterpret_cast<uintptr_t>(memory), heads_, kPadding, width_, scratch_);
  }

  void run() {
    load_query();
    if (pairs_) {
      AmxTiles tiles;
      tiles_ = &tiles;
      visit_tiles();
    } else {
      visit_tiles();
    }
    float* out = args_.out + item_.token * args_.out_stride;
    for (int64_t i = item_.visible > item_.begin ? item_.visible : item_.begin; i < item_.end; ++i) out[i] = -kInfinity;
  }

 private:
  void load_query() {
    float* numbers = scratch_.floats;
    for (int64_t column = 0; column < columns_; ++column) {
      for (int64_t d = 0; d < width_; d += kLanes) store(numbers + d, Vec{});
      if (column < heads_) {
        const char* from = args_.query.data + item_.token * args_.query.token_stride + column * args_.query.head_stride;
        with_float(args_.query.type, [&]<Float T>() {
          for_each_vector<T>(from, args_.query.dim, [&](int64_t d, Vec v, int64_t) { store(numbers + d, v); });
        });
      }
      auto* panel = reinterpret_cast<uint32_t*>(scratch_.query);
      const auto* bits = reinterpret_cast<const uint32_t*>(numbers);
      if (pairs_) {
        for (int64_t pair = 0; pair < width_ / 2; ++pair) {
          panel[pair * columns_ + column] = bits[2 * pair] >> 16 | bits[2 * pair + 1];
        }
      } else {
        for (int64_t d = 0; d < width_; ++d) panel[d * columns_ + column] = bits[d];
      }
      // The sums of the weights' products run over whole vectors.
      scratch_.sum[column] = column < heads_ ? args_.weights[item_.token * heads_ + column] : 0.0f;
    }
  }

  void visit_tiles() {
    const int64_t end = item_.end < item_.visible ? item_.end : item_.visible;
    for (int64_t position = item_.begin; position < end; position += kTileTokens) {
      const int64_t left = end - position;
      score_tile(position, static_cast<int>(left < kTileTokens ? left : kTileTokens));
    }
  }

  void score_tile(int64_t position, int count) {
    float scale[kTileTokens];
    for (int t = 0; t < count; ++t) {
      const int64_t at = position + t, block = at / args_.keys.block_size, within = at % args_.keys.block_size;
      const int64_t named = blocks_.at(block), id = named >= 0 && named < args_.keys.num_blocks ? named : 0;
      unpack_key(args_.keys.data + id * args_.keys.block_stride + within * args_.keys.token_stride, t);
      scale[t] = 1.0f;
      if (args_.scales.data != nullptr) {
        __builtin_memcpy(&scale[t],
                         args_.scales.data + id * args_.scales.block_stride + within * args_.scales.token_stride, 4);
      }
    }
    RowPrefetch none;
    const TileProduct product{pairs_ ? static_cast<const void*>(scratch_.halves) : scratch_.floats,
                              width_,
                              scratch_.query,
                              columns_,
                              scratch_.scores,
                              columns_,
                              nullptr,
                              count,
                              width_,
                              columns_};
    if (pairs_) {
      multiply_tile_pairs(*tiles_, product, none);
    } else {
      multiply_tile_floats(product, none);
    }
    float* out = args_.out + item_.token * args_.out_stride + position;
    for (int t = 0; t < count; ++t) {
      Vec total = {};
      for (int64_t column = 0; column < columns_; column += kLanes) {
        const Vec x = load(scratch_.scores + t * columns_ + column);
        // NaN is not below 0, and so propagates.
        total = fma(x < 0.0f ? Vec{} : x, load(scratch_.sum + column), total);
      }
      out[t] = sum(total) * scale[t];
    }
  }

  PC_FORCE_INLINE void unpack_key(const char* key, int t) {
    const int64_t dim = args_.query.dim;
    uint16_t* halves = scratch_.halves + (pairs_ ? t * width_ : 0);
    float* floats = scratch_.floats + t * width_;
    if (is_e4m3_) {
      unpack_e4m3(key, dim, 1.0f, halves);
    } else if (pairs_) {
      __builtin_memcpy(halves, key, static_cast<size_t>(2 * dim));
    } else {
      with_float(args_.keys.type, [&]<Float T>() {
        for_each_vector<T>(key, dim, [&](int64_t d, Vec v, int64_t) { store(floats + d, v); });
      });
      return clear_numbers(floats, dim, width_);
    }
    clear_numbers(halves, dim, width_);
    if (pairs_) return;
    for (int64_t d = 0; d < width_; d += kLanes) store(floats + d, widen_bf16(load_half(halves + d)));
  }

  const IndexScoreArgs& args_;
  const IndexScoreItem& item_;
  Indices blocks_;
  int64_t heads_;
  int64_t columns_;
  int64_t width_;
  bool is_e4m3_;
  bool pairs_;
  LatentScratch scratch_;
  AmxTiles* tiles_ = nullptr;
};

inline void score_index(const IndexScoreArgs& args, const IndexScoreItem& item, float* scratch) {
  IndexPass(args, item, scratch).run();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
