#include "pagecore/ops/cpu/codecs/hadamard.hpp"

#include <algorithm>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {

void hadamard(const HadamardRows& rows, int64_t num_threads) {
  // A transform takes as long as a move of about twice the bytes that are in the caches.
  constexpr int64_t kCost = 2;
  const int64_t count = rows.outer * rows.inner, bytes = count * rows.dim * size_of(rows.type) * kCost;
  const auto transform = kernels().hadamard;
  const int64_t parts = std::min(threads_to_move(bytes, num_threads), count);
  if (parts <= 1) return transform(rows, 0, count);
  parallel_for(parts, parts, [&](int64_t unit, int64_t) noexcept {
    transform(rows, count * unit / parts, count * (unit + 1) / parts);
  });
}

}  // namespace pagecore::cpu
