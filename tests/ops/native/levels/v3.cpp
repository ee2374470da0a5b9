#define PC_ISA v3
#include "tests/ops/native/levels/level.hpp"
