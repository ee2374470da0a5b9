#define PC_ISA v4_amx
#define PC_AMX
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
