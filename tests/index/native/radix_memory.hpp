// Injected allocation failures: the linker wraps operator new in every driver of the index.
#pragma once

#include <cstdint>

namespace pagecore::test {

// Scope in which `allocations` allocations succeed, and every later one throws std::bad_alloc. Scopes do not nest.
class ShortMemory {
 public:
  explicit ShortMemory(int64_t allocations);
  ShortMemory(const ShortMemory&) = delete;
  ShortMemory& operator=(const ShortMemory&) = delete;
  ~ShortMemory();

  // Returns true if an allocation failed, even if the code handled the failure.
  [[nodiscard]] static bool has_failed();
};

}  // namespace pagecore::test
