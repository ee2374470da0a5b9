// The kernels of latent attention of one instruction set. The including file defines PC_ISA and is compiled for it.
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_attention.hpp"
#include "pagecore/ops/cpu/kernels/latent/latent_index.hpp"
#include "pagecore/ops/cpu/kernels/latent/latent_write.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"

namespace pagecore::cpu::PC_ISA {

const LatentKernels kLatentKernels = {attend_latent, read_latent_row, score_index, write_latent_row, write_index_key};

}  // namespace pagecore::cpu::PC_ISA
