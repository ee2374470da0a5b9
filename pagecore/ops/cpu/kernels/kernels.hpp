// All kernels of one instruction set. The including file defines PC_ISA and is compiled for that instruction set.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/attention.hpp"
#include "pagecore/ops/cpu/kernels/codec.hpp"
#include "pagecore/ops/cpu/kernels/merge.hpp"
#include "pagecore/ops/cpu/kernels/move.hpp"
#include "pagecore/ops/cpu/kernels/select.hpp"
#include "pagecore/ops/cpu/kernels/write.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"

namespace pagecore::cpu::PC_ISA {

const KernelTable kTable = {
    attend_item, merge_splits, clear_rows, merge, write, quantize_rows, dequantize_rows, move_runs, score, summarise,
    &kLatentKernels,
};

}  // namespace pagecore::cpu::PC_ISA
