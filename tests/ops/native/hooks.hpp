// What large calls do, tried at every size: the linker puts our kernels() before the product's (--wrap), which streams
// past the caches and deals a write out to threads when a test says so.
#pragma once

#include <cstdint>

namespace pagecore::test {

struct Hooks {
  bool streams = false;
  int32_t share_bits = 0;  // a write is done in 2^share_bits shares, the last one first
};
extern thread_local Hooks hooks;

}  // namespace pagecore::test
