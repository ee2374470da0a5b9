#include "tests/ops/native/hooks.hpp"

#include "pagecore/ops/cpu/dispatch.hpp"

using namespace pagecore::cpu;

const KernelTable& real_kernels() asm("__real__ZN8pagecore3cpu7kernelsEv");
const KernelTable& wrapped_kernels() asm("__wrap__ZN8pagecore3cpu7kernelsEv");

namespace pagecore::test {

thread_local Hooks hooks;

namespace {

thread_local KernelTable hooked;

void move_hooked(const Move& move, const CopyRun* runs, int64_t num_runs) {
  Move streamed = move;
  streamed.streams = streamed.streams || hooks.streams;
  real_kernels().move(streamed, runs, num_runs);
}

void write_hooked(const WritePart& whole) {
  WritePart part = whole;
  part.streams = part.streams || hooks.streams;
  part.share.bits = hooks.share_bits;
  for (uint64_t left = uint64_t{1} << hooks.share_bits; left > 0; --left) {
    part.share.index = left - 1;
    real_kernels().write(part);
  }
}

}  // namespace
}  // namespace pagecore::test

const KernelTable& wrapped_kernels() {
  using namespace pagecore::test;
  if (!hooks.streams && hooks.share_bits == 0) return real_kernels();
  hooked = real_kernels();
  hooked.move = move_hooked;
  hooked.write = write_hooked;
  return hooked;
}
