// How much the caches of this machine hold.
#pragma once

#include <cstdint>

namespace pagecore::cpu {

// Bytes of a core's second-level cache, looked up once.
[[nodiscard]] int64_t l2_bytes();

}  // namespace pagecore::cpu
