#define PC_ISA v4_bf16
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
