#include "pagecore/ops/cpu/threads.hpp"

namespace pagecore::cpu {

void run_units(int64_t num_units, int64_t, void (*work)(void* context, int64_t unit, int64_t worker), void* context) {
  for (int64_t unit = 0; unit < num_units; ++unit) work(context, unit, 0);
}

}  // namespace pagecore::cpu
