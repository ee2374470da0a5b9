#define PC_ISA v4
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
