#define PC_ISA neon
#include "tests/ops/native/levels/level.hpp"
