// Normalisation of a row's running sums into its output and lse, directly or after merging the splits of its keys.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/products/softmax.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// ALiBi adds slope * (key - position). In a long context that number is large, and softmax cancels most of it. Rows
// therefore use slope * (key - anchor), where the anchor is the attended key with the greatest bias, and the remainder
// is added to the lse at the end, in float64.
PC_FORCE_INLINE int64_t bias_anchor(const Window& window, int64_t position, int64_t length, float slope) {
  const KeyRange keys = attended_keys(window, position, position, length);
  if (keys.begin == keys.end) return 0;
  return slope > 0.0f ? keys.end - 1 : window.sinks > 0 ? 0 : keys.begin;
}

// Per-head options of the output.
struct HeadOptions {
  float slope;
  float sink;
  bool has_sink;
  float value_scale;
};

PC_FORCE_INLINE HeadOptions head_options(const AttentionArgs& args, int64_t head, int64_t kv_head) {
  return {head_value(args.alibi_slopes, head, 0.0f), head_value(args.sinks, head, 0.0f), args.sinks.data != nullptr,
          head_value(args.value_scale, kv_head, 1.0f)};
}

PC_FORCE_INLINE void store_output(const TokenArray& out, int64_t token, int64_t head, const float* acc, float factor) {
  char* row = out.data + token * out.token_stride + head * out.head_stride;
  with_float(out.type, [&]<Float T>() {
    for (int64_t d = 0; d < out.dim; d += kLanes) {
      const int64_t count = out.dim - d < kLanes ? out.dim - d : kLanes;
      store_part<T>(row, d, load(acc + d) * factor, count);
    }
  });
}

// Writes the output and lse of one row. `position` and `length` are those of the scores; they determine the ALiBi
// anchor.
inline void finish_row(const AttentionArgs& args, const HeadOptions& options, int64_t token, int64_t head,
                       int64_t position, int64_t length, float row_max, float row_sum, const float* acc) {
  double bias = 0.0;
  if (options.slope != 0.0f) {
    const Window window = make_window(args.causal, args.window_left, args.window_right, args.sink_tokens);
    const int64_t anchor = bias_anchor(window, position, length, options.slope);
    bias = static_cast<double>(options.slope) * static_cast<double>(anchor - position);
  }
  double top = row_max;
  double total = row_sum;
  double factor = options.value_scale;
  if (options.has_sink) {
    const double sink = static_cast<double>(options.sink) - bias;
    if (sink > top) {
      const double rescale = __builtin_exp(top - sink);
      total = total * rescale + 1.0;
      factor *= rescale;
      top = sink;
    } else if (sink > -static_cast<double>(kInfinity)) {
      total += __builtin_exp(sink - top);
    } else if (sink != sink) {
      total = sink;
    }
  }
  factor = total == 0.0 ? 0.0 : factor / total;
  store_output(args.out, token, head, acc, static_cast<float>(factor));
  if (args.lse.data != nullptr) {
    args.lse.at(token, head) = total == 0.0 ? -kInfinity : static_cast<float>(top + __builtin_log(total) + bias);
  }
}

// Stores the sums of one row of a split as partial row `at`, for merge_splits.
PC_FORCE_INLINE void store_partial(const AttentionBatch& batch, int64_t at, float row_max, float row_sum,
                                   const float* acc, int64_t stride) {
  batch.partial_stats[2 * at] = row_max;
  batch.partial_stats[2 * at + 1] = row_sum;
  for (int64_t d = 0; d < stride; d += kLanes) store(batch.partial_out + at * stride + d, load(acc + d));
}

// Folds the partial rows of one query tile, first to last, and writes its output. `acc` is scratch for one padded value
// row.
inline void merge_splits(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, float* acc) {
  const int64_t heads = args.query.num_heads, group = heads / args.key.num_heads, stride = padded(args.value.dim);
  const int64_t length = batch.seq_lens[item.sequence];
  const int64_t position = length - (batch.cu_query_lens[item.sequence + 1] - item.query_begin);
  for (int64_t query = 0; query < item.query_count; ++query) {
    for (int64_t head = 0; head < heads; ++head) {
      float row_max = -kInfinity, row_sum = 0.0f;
      for (int64_t d = 0; d < stride; d += kLanes) store(acc + d, Vec{});
      for (int64_t split = 0; split < item.num_splits; ++split) {
        const int64_t at = (item.partial + split * item.query_count + query) * heads + head;
        const float* stats = batch.partial_stats + 2 * at;
        fold_row(row_max, row_sum, acc, stats[0], stats[1], batch.partial_out + at * stride, stride);
      }
      const int64_t token = item.query_begin + query;
      const int64_t at = batch.tree_positions == nullptr ? position + query : batch.tree_positions[token];
      finish_row(args, head_options(args, head, head / group), token, head, at, length, row_max, row_sum, acc);
    }
  }
}

// Sets the output to 0 and the lse to -inf.
inline void clear_rows(const AttentionArgs& args, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    for (int64_t head = 0; head < args.out.num_heads; ++head) {
      __builtin_memset(args.out.data + token * args.out.token_stride + head * args.out.head_stride, 0,
                       static_cast<size_t>(args.out.dim * size_of(args.out.type)));
      if (args.lse.data != nullptr) args.lse.at(token, head) = -kInfinity;
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
