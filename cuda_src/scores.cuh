// From products of queries and keys to weights: what changes a score, and the running softmax.
//
// Scores are logarithms to base 2. Kernels come in two kinds: `Plain` only multiplies by the scale, and what a query
// may not attend to lies at the edges of the keys; `Full` also caps, adds ALiBi's bias and looks at the mask. Sinks and
// the scale of values wait until the sums are complete, and cost nothing here.
//
// Factors are never negative: where the scale is, the query's sign is turned once (`ScoreRule::negate`), so that the
// largest product is the largest score.
#pragma once

#include "attention_batch.cuh"

namespace pagecore {

struct Plain {
  static constexpr bool kFull = false;
  // Variants of prefill.cu, for comparisons on a GPU; calls use them only where they are selected by name.
  static constexpr bool kSlotsFirst = false;  // reads the slots of a tile before it begins the first copy
  static constexpr bool kWholeTile = false;   // holds the scores of all keys of a tile, not of one half at a time
};
struct SlotsFirst : Plain {
  static constexpr bool kSlotsFirst = true;
};
struct WholeTile : Plain {
  static constexpr bool kWholeTile = true;
};
struct SlotsFirstWholeTile : Plain {
  static constexpr bool kSlotsFirst = true;
  static constexpr bool kWholeTile = true;
};
struct Full : Plain {
  static constexpr bool kFull = true;
};

// Within about one unit in the last place, also around 0.
PC_DEVICE float tanh_of(float x) {
  const float a = pc_max(x, -x);
  const float z = a * a;
  float p = pc_fma(-5.7170038588e-03f, z, 2.0650552135e-02f);
  p = pc_fma(p, z, -5.3743487867e-02f);
  p = pc_fma(p, z, 1.3331491172e-01f);
  p = pc_fma(p, z, -3.3333283921e-01f);
  const float near = pc_fma(a * z, p, a);
  const float far = 1.0f - 2.0f / (pc_exp2(a * (2.0f * kLog2OfE)) + 1.0f);  // 1 where the power is infinite
  const float result = a < 0.625f ? near : far;                             // NaN goes the second way
  return x < 0.0f ? -result : result;
}

// What every score of a key head has in common.
struct ScoreRule {
  float before;  // Full: what a product is multiplied by before the cap and the bias
  float cap;     // Full: softcap * log2(e), or 0
  float factor;  // what scores are multiplied by within the softmax; Full: 1
  bool negate;   // the query is to be multiplied by -1
};

template <typename Options>
PC_DEVICE ScoreRule make_rule(const PcAttentionParams& p, int kv_head) {
  const float scale = p.scale * load_number(p.key_scale, kv_head, 1.0f);
  const float size = pc_max(scale, -scale);
  ScoreRule rule;
  rule.negate = scale < 0.0f;
  if (!Options::kFull) {
    // Not 0: products of keys that are not attended to are -infinity.
    rule.factor = pc_max(size * kLog2OfE, 1.2e-38f);
    return rule;
  }
  rule.cap = p.softcap * kLog2OfE;
  rule.before = p.softcap != 0.0f ? size / p.softcap : size * kLog2OfE;
  rule.factor = 1.0f;
  return rule;
}

// What a query of one head attends to, and how its scores are biased.
struct ScoreRow {
  KeyRange keys;
  int position;
  float slope;   // Full: of ALiBi, times log2(e)
  MaskRow mask;  // Full
};

// What a query attends to of an item's keys.
PC_DEVICE KeyRange keys_of(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item, int position) {
  const KeyRange keys = attended_keys(p, position, sequence.length);
  const int begin = max_of(keys.begin, item.key_begin);
  return {begin, max_of(min_of(keys.end, item.key_end), begin)};
}

// `exists`: whether there is such a row; one that is not attends to nothing.
template <typename Options>
PC_DEVICE ScoreRow load_score_row(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item,
                                  int query_row, int head, bool exists) {
  ScoreRow row;
  row.position = sequence.position(query_row);
  row.keys = keys_of(p, sequence, item, row.position);
  if (!exists) row.keys.end = row.keys.begin;
  if (Options::kFull) {
    row.slope = exists ? load_number(p.alibi_slopes, head, 0.0f) * kLog2OfE : 0.0f;
    row.mask = exists ? load_mask_row(p, sequence, query_row) : MaskRow{0};
  }
  return row;
}

// Keys of the item that all of its queries attend to, as far as causality and windows go: tiles among these have no
// edge.
PC_DEVICE KeyRange common_keys(const PcAttentionParams& p, const Sequence& sequence, const PcWorkItem& item) {
  const int first = sequence.position(item.query_begin);
  const KeyRange a = keys_of(p, sequence, item, first);
  const KeyRange b = keys_of(p, sequence, item, first + item.query_count - 1);
  return {b.begin, max_of(a.end, b.begin)};
}

// A product as a score, without the tests of what is attended to.
template <typename Options>
PC_DEVICE float change_score(const ScoreRule& rule, const ScoreRow& row, float product, int j) {
  if (!Options::kFull) return product;
  float score = product * rule.before;
  if (rule.cap != 0.0f) score = tanh_of(score) * rule.cap;
  return pc_fma(static_cast<float>(j - row.position), row.slope, score);
}

template <typename Options>
PC_DEVICE bool attends(const PcAttentionParams& p, const ScoreRow& row, int j) {
  return row.keys.has(j) && (!Options::kFull || p.mask == 0 || row.mask.has(p, j));
}

// The products of a warp's 16 rows with 8 * Tiles keys, as pc_multiply leaves them, become scores. With g = lane / 4,
// rows are those of g and g + 8; key(tile, i) = first_key + 8 * tile + i % 2 where first_key counts 2 * (lane % 4).
// `edge`: whether some of these keys are not common to all rows (`common_keys`).
template <typename Options, int Tiles>
PC_DEVICE void change_scores(const PcAttentionParams& p, const ScoreRule& rule, const ScoreRow (&rows)[2],
                             int first_key, bool edge, float (&s)[Tiles][4]) {
  if (Options::kFull) {
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        s[t][i] = change_score<Options>(rule, rows[i >> 1], s[t][i], first_key + 8 * t + (i & 1));
      }
    }
  }
  if (!edge && (!Options::kFull || p.mask == 0)) return;
  PC_UNROLL
  for (int t = 0; t < Tiles; ++t) {
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (!attends<Options>(p, rows[i >> 1], first_key + 8 * t + (i & 1))) s[t][i] = -pc_infinity();
    }
  }
}

// ---- the running softmax

// What scores are counted from: the largest, or 0 where there is none, because -inf - -inf is NaN.
PC_DEVICE float finite_or_zero(float top) { return top == -pc_infinity() ? 0.0f : top; }

// Of the two rows of a lane. `top` is the same in the 4 lanes of a row, `sum` of the lane's own keys only.
struct Softmax {
  float top[2];  // largest score so far, before the factor
  float sum[2];

  PC_MEMBER void clear() {
    top[0] = top[1] = -pc_infinity();
    sum[0] = sum[1] = 0.0f;
  }
};

// Scores become weights, 2 to the power of factor * (score - largest so far); `keep` is what the rows' older sums are
// worth since. A score of NaN gives a weight of NaN.
template <int Tiles>
PC_DEVICE void add_to_softmax(float factor, Softmax& state, float (&s)[Tiles][4], float (&keep)[2]) {
  PC_UNROLL
  for (int r = 0; r < 2; ++r) {
    float top = state.top[r];
    PC_UNROLL
    for (int t = 0; t < Tiles; ++t) top = pc_max(top, pc_max(s[t][2 * r], s[t][2 * r + 1]));
    top = pc_max(top, pc_shuffle_xor(top, 1));
    top = pc_max(top, pc_shuffle_xor(top, 2));
    const float origin = -factor * finite_or_zero(top);
    // Exactly 1 where it stays: factor * top - round(factor * top) is not 0.
    keep[r] = top == state.top[r] ? 1.0f : pc_exp2(pc_fma(factor, state.top[r], origin));
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
    state.sum[r] = pc_fma(state.sum[r], keep[r], sum);
  }
}

// The sums of a row's 4 lanes.
PC_DEVICE void complete_softmax(Softmax& state) {
  PC_UNROLL
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += pc_shuffle_xor(state.sum[r], 1);
    state.sum[r] += pc_shuffle_xor(state.sum[r], 2);
  }
}

// The weights of 16 of these keys as the left operand of pc_multiply.
template <typename T>
PC_DEVICE void pack_weights(const float (&low)[4], const float (&high)[4], pc_uint32 (&a)[4]) {
  a[0] = pc_pack<T>(low[0], low[1]);
  a[1] = pc_pack<T>(low[2], low[3]);
  a[2] = pc_pack<T>(high[0], high[1]);
  a[3] = pc_pack<T>(high[2], high[3]);
}

// ---- the end of a row

struct RowEnd {
  float factor;  // what its weighted sum of values is multiplied by
  float lse;     // natural logarithm
};

// `top` is the largest score, factor included, and `sum` counts from it. A sink of -infinity is none.
PC_DEVICE RowEnd end_row(float top, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, sink};
  const float bare = sink * kLog2OfE;
  const float origin = finite_or_zero(pc_max(top, bare));
  const float own = pc_exp2(top - origin);
  const float total = pc_fma(sum, own, pc_exp2(bare - origin));
  return {own / total, (origin + pc_log2(total)) * kLogOf2};
}

}  // namespace pagecore

// Instances are named by these.
using pagecore::Full;
using pagecore::Plain;
using pagecore::SlotsFirst;
using pagecore::SlotsFirstWholeTile;
using pagecore::WholeTile;
