#define PC_ISA neon
#include "pagecore/ops/cpu/kernels/kernels.hpp"
