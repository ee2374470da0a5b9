#define PC_ISA v4_bf16
#include "tests/ops/native/levels/level.hpp"
