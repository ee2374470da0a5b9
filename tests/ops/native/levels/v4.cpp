#define PC_ISA v4
#include "tests/ops/native/levels/level.hpp"
