#define PC_ISA v4_amx
#define PC_AMX
#include "tests/ops/native/levels/level.hpp"
