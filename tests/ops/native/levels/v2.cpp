#define PC_ISA v2
#include "tests/ops/native/levels/level.hpp"
