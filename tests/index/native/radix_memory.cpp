// Wrappers of operator new, linked by -Wl,--wrap (tests/native/sanitize.mk), so that the sanitizer keeps its own.
#include "tests/index/native/radix_memory.hpp"

#include <cstddef>
#include <new>

namespace {

bool is_short = false;
bool failed = false;
int64_t left = 0;

void count() {
  if (!is_short || --left >= 0) return;
  failed = true;
  throw std::bad_alloc();
}

}  // namespace

extern "C" {

void* __real__Znwm(size_t size);
void* __real__Znam(size_t size);
void* __wrap__Znwm(size_t size);
void* __wrap__Znam(size_t size);

void* __wrap__Znwm(size_t size) {
  count();
  return __real__Znwm(size);
}

void* __wrap__Znam(size_t size) {
  count();
  return __real__Znam(size);
}
}

namespace pagecore::test {

ShortMemory::ShortMemory(int64_t allocations) {
  is_short = true;
  failed = false;
  left = allocations;
}

ShortMemory::~ShortMemory() { is_short = false; }

bool ShortMemory::has_failed() { return failed; }

}  // namespace pagecore::test
