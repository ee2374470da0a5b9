#define PC_ISA v3
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
