// Memory that runs out when a test wants it to: the linker puts these before operator new of every driver of the index.
#pragma once

#include <cstdint>

namespace pagecore::test {

// While one lives, so many allocations succeed and no more; the one that fails throws std::bad_alloc, as do all after
// it. One at a time.
class ShortMemory {
 public:
  explicit ShortMemory(int64_t allocations);
  ShortMemory(const ShortMemory&) = delete;
  ShortMemory& operator=(const ShortMemory&) = delete;
  ~ShortMemory();

  // Whether one failed, be it that the code went on without.
  [[nodiscard]] static bool has_failed();
};

}  // namespace pagecore::test
