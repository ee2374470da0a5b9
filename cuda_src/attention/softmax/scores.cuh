// Scores and softmax: the transformation of products of queries and keys, masking, and the online softmax.
//
// Scores are base-2 logarithms. `Plain` options (options.cuh) multiply products by the scale, and keys that a query
// does not attend to occur only at the edges of the key range. `Full` also applies the softcap, the ALiBi bias, and the
// mask or the tree. Sinks and the scale of values are applied after the last tile, for both kinds.
//
// The factor is never negative: for a negative scale the queries are negated once (`ScoreRule::negate`), so that the
// largest product is the largest score.
#pragma once

#include "cuda_src/attention/inputs/tree.cuh"

namespace pagecore {

// ---- scores

// tanh within about one unit in the last place, also near 0.
PC_DEVICE float tanh_of(float x) {
  const float a = pc_max(x, -x);
  const float z = a * a;
  float p = pc_fma(-5.7170038588e-03f, z, 2.0650552135e-02f);
  p = pc_fma(p, z, -5.3743487867e-02f);
  p = pc_fma(p, z, 1.3331491172e-01f);
  p = pc_fma(p, z, -3.3333283921e-01f);
  const float near = pc_fma(a * z, p, a);
  const float far = 1.0f - 2.0f / (pc_exp2(a * (2.0f * kLog2OfE)) + 1.0f);  // 1 if the power overflows
  const float result = a < 0.625f ? near : far;                             // NaN takes `far`
  return x < 0.0f ? -result : result;
}

// Constants of the scores of one key head.
struct ScoreRule {
  float before;  // Full: factor of a product before the cap and the bias
  float cap;     // Full: softcap * log2(e), or 0
  float factor;  // factor of a score inside the softmax; 1 for Full
  bool negate;   // the queries are negated
};

template <typename Options>
PC_DEVICE ScoreRule make_rule(const PcAttentionParams& p, int kv_head) {
  const float query_scale = load_or(p.query_scale, kv_head * p.query_scale_stride, 1.0f);  // fault: query_scale
  const float scale = p.scale * load_or(p.key_scale, kv_head * p.key_scale_stride, 1.0f) * query_scale;
  const float size = pc_max(scale, -scale);
  ScoreRule rule;
  rule.negate = scale < 0.0f;
  if (!Options::kFull) {
    // Above 0, because the product of a masked key is -infinity and 0 * -infinity is NaN.
    rule.factor = pc_max(size * kLog2OfE, 1.2e-38f);
    return rule;
  }
  rule.cap = p.softcap * kLog2OfE;
  rule.before = p.softcap != 0.0f ? size / p.softcap : size * kLog2OfE;
  rule.factor = 1.0f;
  return rule;
}

// Keys and bias of one query of one head.
struct ScoreRow {
  KeyRange keys;
  int position;
  float slope;   // Full: ALiBi slope times log2(e)
  MaskRow mask;  // Full
};

template <typename Options>
PC_DEVICE KeyRange within_item(const PcAttentionParams& p, const KeyRange& keys, const PcWorkItem& item) {
  const int begin = max_of(first_of_item<Options::kSinks>(p, item, keys.begin), item.key_begin);
  const int end = min_of(keys.end, item.key_end);  // fault: keys_of_other_splits
  return {begin, max_of(end, begin)};
}

// Keys of the item that the query at `position` attends to, in numbers if keys are selected.
template <typename Options>
PC_DEVICE KeyRange item_keys(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item,
                             int position) {
  return within_item<Options>(p, keys_in_numbers<Options::kSelected>(p, sequence, position), item);
}

// `exists`: false for a row past the rows of the item, which attends to nothing.
template <typename Options>
PC_DEVICE ScoreRow load_score_row(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item,
                                  int query_row, int head, bool exists) {
  ScoreRow row;
  row.position = sequence.position(query_row);
  if (Options::kTree && p.tree.words != 0) {
    const int own = exists ? query_row : sequence.queries_begin;
    row.position = tree_position(p, sequence, own);
    row.keys = within_item<Options>(p, tree_keys(p, sequence, own, row.position), item);
  } else {
    row.keys = item_keys<Options>(p, sequence, item, row.position);
  }
  if (!exists) row.keys.end = row.keys.begin;
  if (Options::kFull) {
    row.slope = exists ? load_or(p.alibi_slopes, head, 0.0f) * kLog2OfE : 0.0f;
    row.mask = !exists ? MaskRow{0}
               : Options::kTree && p.tree.words != 0
                   ? TreeRow::pack(sequence.position(sequence.queries_begin), query_row)
                   : load_mask_row(p, sequence, query_row);
  }
  return row;
}

// Keys of the item that all of its queries attend to, ignoring the mask. A tile within this range needs no masking.
// With a tree the range ends before the new tokens.
template <typename Options>
PC_DEVICE KeyRange common_keys(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item) {
  const int first = sequence.position(item.query_begin);
  const KeyRange a = item_keys<Options>(p, sequence, item, first);
  const KeyRange b = item_keys<Options>(p, sequence, item, first + item.query_count - 1);
  if (Options::kTree && p.tree.words != 0) {
    return {b.begin, min_of(a.end, sequence.position(sequence.queries_begin))};
  }
  return {b.begin, max_of(a.end, b.begin)};
}

// Returns the score of a product with the key at position j, without masking.
template <typename Options>
PC_DEVICE float transform_score(const ScoreRule& rule, const ScoreRow& row, float product, int j) {
  if (!Options::kFull) return product;
  float score = product * rule.before;
  if (rule.cap != 0.0f) score = tanh_of(score) * rule.cap;
  return pc_fma(static_cast<float>(j - row.position), row.slope, score);
}

// Returns true if key j, which is at `position`, is in the range and the mask of a row.
template <typename Options>
PC_DEVICE bool in_mask(const PcAttentionParams& p, const ScoreRow& row, int j, int position) {
  return row.keys.has(j) && (!Options::kFull || p.mask == 0 || row.mask.has(p, position));
}

// Returns true if a row attends to key j, which is at `position`.
template <typename Options>
PC_DEVICE bool attends(const PcAttentionParams& p, const ScoreRow& row, int j, int position) {
  if (Options::kTree && p.tree.words != 0) return row.keys.has(j) && TreeRow(row.mask).has(p, j);
  return in_mask<Options>(p, row, j, position);
}
template <typename Options>
PC_DEVICE bool attends(const PcAttentionParams& p, const ScoreRow& row, int j) {
  return attends<Options>(p, row, j, j);
}

// Masks scores of keys among which are new tokens of a tree; see transform_scores.
template <int Tiles>
PC_DEVICE void mask_tree(const PcAttentionParams& p, const ScoreRow (&rows)[2], int first_key, float (&s)[Tiles][4]) {
  static_assert(8 * Tiles <= 32, "one word has the bits of all keys");
  PC_UNROLL
  for (int r = 0; r < 2; ++r) {
    const pc_uint32 bits = TreeRow(rows[r].mask).bits(p, first_key);
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) {
      PC_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int k = 8 * t + i;
        if (!rows[r].keys.has(first_key + k) || (bits >> k & 1) == 0) s[t][2 * r + i] = -pc_infinity();
      }
    }
  }
}

// Transforms the products of a warp's 16 rows with 8 * Tiles keys, as pc_multiply leaves them, to masked scores. A lane
// holds elements of rows lane / 4 and lane / 4 + 8. Element i of tile t is key first_key + 8 * t + i % 2, where
// first_key includes the lane's column 2 * (lane % 4).
// `edge`: true if not all rows attend to all of these keys (`common_keys`).
template <typename Options, int Tiles>
PC_DEVICE void transform_scores(const PcAttentionParams& p, const ScoreRule& rule, const ScoreRow (&rows)[2],
                                int first_key, bool edge, float (&s)[Tiles][4]) {
  if (Options::kFull) {
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        s[t][i] = transform_score<Options>(rule, rows[i >> 1], s[t][i], first_key + 8 * t + (i & 1));
      }
    }
  }
  if (!edge && (!Options::kFull || !masks_all_keys(p))) return;
  if constexpr (Options::kTree) {
    if (p.tree.words != 0) return mask_tree(p, rows, first_key, s);
  }
  PC_UNROLL
  for (int t = 0; t < Tiles; ++t) {
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int j = first_key + 8 * t + (i & 1);
      if (!in_mask<Options>(p, rows[i >> 1], j, j)) s[t][i] = -pc_infinity();
    }
  }
}

// ---- online softmax

// The reference point of exponents: the largest score, or 0 if all are -infinity, because -inf - -inf is NaN.
PC_DEVICE float finite_or_zero(float top) { return top == -pc_infinity() ? 0.0f : top; }

// State of the two rows of a lane. The 4 lanes of a row have the same `top`; `sum` covers the lane's own keys only.
struct Softmax {
  float top[2];  // largest score so far, before the factor
  float sum[2];

  PC_MEMBER void clear() {
    top[0] = top[1] = -pc_infinity();
    sum[0] = sum[1] = 0.0f;
  }
};

// Replaces scores by weights, 2^(factor * (score - largest so far)), and adds them to the sums. `rescale` is the factor
// by which older sums of the rows must be multiplied. A score of NaN gives a weight of NaN.
template <int Tiles>
PC_DEVICE void update_softmax(float factor, Softmax& state, float (&s)[Tiles][4], float (&rescale)[2]) {
  PC_UNROLL
  for (int r = 0; r < 2; ++r) {
    float top = state.top[r];
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) top = pc_max(top, pc_max(s[t][2 * r], s[t][2 * r + 1]));
    top = pc_max(top, pc_shuffle_xor(top, 1));
    top = pc_max(top, pc_shuffle_xor(top, 2));
    const float origin = -factor * finite_or_zero(top);
    // Exactly 1 if `top` did not change: factor * top - round(factor * top) is not 0.
    rescale[r] = top == state.top[r] ? 1.0f : pc_exp2(pc_fma(factor, state.top[r], origin));
    float sum = 0.0f;
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) {
      PC_UNROLL
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        s[t][i] = pc_exp2(pc_fma(factor, s[t][i], origin));
        sum += s[t][i];
      }
    }
    state.top[r] = top;
    state.sum[r] = pc_fma(state.sum[r], rescale[r], sum);
  }
}

// Adds up the sums of the 4 lanes of each row.
PC_DEVICE void complete_softmax(Softmax& state) {
  PC_UNROLL
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += pc_shuffle_xor(state.sum[r], 1);
    state.sum[r] += pc_shuffle_xor(state.sum[r], 2);
  }
}

// Packs the weights of 16 keys as the left operand of pc_multiply.
template <typename T>
PC_DEVICE void pack_weights(const float (&low)[4], const float (&high)[4], pc_uint32 (&a)[4]) {
  a[0] = pc_pack<T>(low[0], low[1]);
  a[1] = pc_pack<T>(low[2], low[3]);
  a[2] = pc_pack<T>(high[0], high[1]);
  a[3] = pc_pack<T>(high[2], high[3]);
}

// ---- the end of a row

struct RowEnd {
  float factor;  // of the row's weighted sum of values
  float lse;     // natural logarithm
};

// `top` is the largest score, factor included, and `sum` is relative to it. `sink` is -infinity if there is none.
PC_DEVICE RowEnd end_row(float top, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, sink};
  const float bare = sink * kLog2OfE;
  if (top < bare && bare == pc_infinity() && sum == sum) return {0.0f, sink};  // beyond all scores
  const float origin = finite_or_zero(pc_max(top, bare));
  const float own = pc_exp2(top - origin);
  const float total = pc_fma(sum, own, pc_exp2(bare - origin));
  return {own / total, (origin + pc_log2(total)) * kLogOf2};
}

}  // namespace pagecore
