// The queries of a pass, loaded as its products take them.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/pass.hpp"
#include "pagecore/ops/cpu/kernels/tiles/query.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The factor of the scores is the softmax scale times the head's key scale. Float queries are multiplied by it here,
// rounded once per number; bfloat16 queries stay as they are, and softmax multiplies their scores.
PC_FORCE_INLINE void load_rows(Pass& pass, int64_t head) {
  const AttentionArgs& args = pass.args;
  const int64_t stride = pass.choices.query_stride;
  double factor = args.scale * static_cast<double>(head_value(args.key_scale, pass.head_begin + head, 1.0f));
  if (args.softcap != 0.0) factor /= args.softcap;
  pass.scratch.scale[head] = pass.choices.pairs ? static_cast<float>(factor) : 1.0f;
  for (int64_t row = 0; row < pass.rows; ++row) {
    const int64_t token = pass.item.query_begin + row / pass.group;
    const int64_t query_head = (pass.head_begin + head) * pass.group + row % pass.group;
    if (pass.choices.pairs) {
      copy_query(args, token, query_head, pass.query_pairs(head) + row * stride, stride);
    } else {
      scale_query(args, token, query_head, factor, pass.query_floats(head) + row * stride, stride);
    }
  }
}

// Orders the loaded rows of a head for products with codes. Returns false if they cannot be integers, or digits.
PC_FORCE_INLINE bool order_rows(Pass& pass, int64_t head) {
  const Cache& key = pass.args.key;
  const int64_t rows = pass.rows, at = head * rows, stride = pass.choices.query_stride;
  switch (pass.choices.key_products) {
    case CodeProducts::Integers:
      return make_integers(pass.query_floats(head), stride, rows, key,
                           reinterpret_cast<int16_t*>(pass.scratch.unpacked), pass.query_integers(at),
                           pass.scratch.integer_rows + at);
    case CodeProducts::Pairs: order_pair_queries(key, pass.query_pairs(head), rows, pass.scratch.unpacked); return true;
    case CodeProducts::Floats: order_floats(key, pass.query_floats(head), stride, rows); return true;
    case CodeProducts::None: break;
  }
  return pass.choices.by_amx && pass.keys.takes_digits(rows) &&
         pack_query_digits(pass.query_pairs(head), stride, rows, key, pass.query_panel(head),
                           pass.scratch.integer_rows + at);
}

// Packs bfloat16 queries for AMX.
PC_FORCE_INLINE void pack_rows([[maybe_unused]] Pass& pass, [[maybe_unused]] int64_t head) {
#if defined(PC_AMX)
  uint16_t* const queries = pass.query_pairs(head);
  if (pass.keys.packs()) {
    return pack_code_queries(pass.args.key, queries, pass.rows, pass.scratch.unpacked, pass.query_panel(head));
  }
  pack_query_pairs(queries, pass.choices.query_stride, pass.rows, pass.args.key.dim, pass.query_panel(head));
#endif
}

// The way of computing scores; `ordered` if the queries of all heads are, for products with codes.
inline ScorePath score_path_of(const Pass& pass, bool ordered) {
  const PassChoices& choices = pass.choices;
  if (ordered) return choices.key_products != CodeProducts::None ? ScorePath::Codes : ScorePath::AmxDigits;
  if (pass.keys.packs()) return choices.by_amx ? ScorePath::AmxCodes : ScorePath::PackedCodes;
  if (choices.by_amx) return ScorePath::AmxRows;
  if (choices.packed) return choices.pairs ? ScorePath::PackedPairs : ScorePath::Packed;
  return choices.pairs ? ScorePath::PairRows : ScorePath::Rows;
}

inline void load_queries(Pass& pass) {
  bool ordered = true;
  for (int64_t head = 0; head < pass.head_count; ++head) {
    load_rows(pass, head);
    ordered = ordered && order_rows(pass, head);
  }
  pass.score_path = score_path_of(pass, ordered);
  if (pass.score_path != ScorePath::AmxRows && pass.score_path != ScorePath::AmxCodes) return;
  for (int64_t head = 0; head < pass.head_count; ++head) pack_rows(pass, head);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
