// Hooks that apply the paths of large calls at every size. The linker puts our kernels() before the library's (--wrap);
// it streams and divides writes into shares when a test says so.
#pragma once

#include <cstdint>

namespace pagecore::test {

struct Hooks {
  bool streams = false;
  int32_t share_bits = 0;  // a write runs in 2^share_bits shares, last share first
};
extern thread_local Hooks hooks;

}  // namespace pagecore::test
