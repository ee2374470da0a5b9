// quantize and dequantize: division of the rows among threads.
#include <algorithm>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

void run(const Codec& codec, void (*rows)(const Codec&, int64_t, int64_t), int64_t num_threads) {
  const int64_t bytes = codec.num_rows * codec.dim * size_of(codec.type);
  num_threads = std::min(threads_to_move(bytes, num_threads), codec.num_rows);
  if (num_threads <= 1) return rows(codec, 0, codec.num_rows);
  parallel_for(num_threads, num_threads, [&](int64_t unit, int64_t) noexcept {
    rows(codec, codec.num_rows * unit / num_threads, codec.num_rows * (unit + 1) / num_threads);
  });
}

}  // namespace

void quantize(const Codec& codec, int64_t num_threads) { run(codec, kernels().quantize, num_threads); }

void dequantize(const Codec& codec, int64_t num_threads) { run(codec, kernels().dequantize, num_threads); }

}  // namespace pagecore::cpu
