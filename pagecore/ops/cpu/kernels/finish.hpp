// A row's running sums become its output and lse.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/softmax.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// ALiBi adds slope * (key - position). Over a long context that is a large number, most of which the softmax cancels again;
// so rows work with slope * (key - anchor), where the anchor is the attended key whose bias is greatest, and the rest is
// added to the lse at the end, in float64.
PC_FORCE_INLINE int64_t bias_anchor(const Window& window, int64_t position, int64_t length, float slope) {
  const KeyRange keys = attended_keys(window, position, position, length);
  if (keys.begin == keys.end) return 0;
  return slope > 0.0f ? keys.end - 1 : keys.begin;
}

// What multiplies one head's stored values, its sink, its slope.
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

PC_FORCE_INLINE void store_output(const Rows& out, int64_t token, int64_t head, const float* acc, float factor) {
  char* row = out.data + token * out.token_stride + head * out.head_stride;
  with_float(out.type, [&]<Float T>() {
    for (int64_t d = 0; d < out.dim; d += kLanes) {
      const int64_t count = out.dim - d < kLanes ? out.dim - d : kLanes;
      store_part<T>(row, d, load(acc + d) * factor, count);
    }
  });
}

// position and length as in the scores: the ALiBi anchor follows from them.
inline void finish_row(const AttentionArgs& args, const HeadOptions& head_opts, int64_t token, int64_t head,
                       int64_t position, int64_t length, float row_max, float row_sum, const float* acc) {
  double bias = 0.0;
  if (head_opts.slope != 0.0f) {
    const Window window = make_window(args.causal, args.window_left, args.window_right);
    const int64_t anchor = bias_anchor(window, position, length, head_opts.slope);
    bias = static_cast<double>(head_opts.slope) * static_cast<double>(anchor - position);
  }
  double top = row_max;
  double total = row_sum;
  double factor = head_opts.value_scale;
  if (head_opts.has_sink) {
    const double sink = static_cast<double>(head_opts.sink) - bias;
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

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
