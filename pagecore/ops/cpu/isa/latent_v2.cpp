#define PC_ISA v2
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
