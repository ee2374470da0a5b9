#define PC_ISA neon
#include "pagecore/ops/cpu/kernels/latent_kernels.hpp"
