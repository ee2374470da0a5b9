#include "pagecore/ops/cpu/threads/cost.hpp"

#include <unistd.h>

#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pagecore::cpu {
namespace {

#if defined(__x86_64__)
// L2 size by cpuid. Intel and AMD use different leaves with the same layout.
int64_t l2_of_cpuid(uint32_t leaf, uint32_t leaf_max) {
  if (leaf > leaf_max) return 0;
  for (uint32_t i = 0; i < 16; ++i) {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    __cpuid_count(leaf, i, a, b, c, d);
    if ((a & 31) == 0) break;
    const bool is_level_2 = ((a >> 5) & 7) == 2, holds_data = (a & 31) != 2;
    if (!is_level_2 || !holds_data) continue;
    const int64_t ways = (b >> 22) + 1, partitions = ((b >> 12) & 0x3ff) + 1, line = (b & 0xfff) + 1;
    return ways * partitions * line * (int64_t{c} + 1);
  }
  return 0;
}

int64_t ask_cpuid() {
  constexpr uint32_t kIntel = 4, kAmd = 0x8000001d;
  const int64_t found = l2_of_cpuid(kIntel, __get_cpuid_max(0, nullptr));
  return found > 0 ? found : l2_of_cpuid(kAmd, __get_cpuid_max(0x80000000, nullptr));
}
#else
int64_t ask_cpuid() { return 0; }
#endif

int64_t ask_system() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  return sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  return 0;
#endif
}

int64_t look_up() {
  constexpr int64_t kUsual = 1 << 20, kLeast = 128 << 10, kMost = 64 << 20;
  for (const int64_t bytes : {ask_cpuid(), ask_system()}) {
    if (bytes >= kLeast && bytes <= kMost) return bytes;
  }
  return kUsual;
}

}  // namespace

int64_t l2_bytes() {
  static const int64_t bytes = look_up();
  return bytes;
}

}  // namespace pagecore::cpu
