// All kernels of one instruction set. The including file defines PC_ISA and is compiled for that instruction set.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/attention.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"
#if !defined(PC_AMX)
#include "pagecore/ops/cpu/kernels/merge.hpp"
#include "pagecore/ops/cpu/kernels/merge_many.hpp"
#include "pagecore/ops/cpu/kernels/rows/codec.hpp"
#include "pagecore/ops/cpu/kernels/rows/hadamard.hpp"
#include "pagecore/ops/cpu/kernels/rows/move.hpp"
#include "pagecore/ops/cpu/kernels/rows/write.hpp"
#include "pagecore/ops/cpu/kernels/select.hpp"
#endif

namespace pagecore::cpu::PC_ISA {

#if defined(PC_AMX)
// Tiles are for attention. Null kernels are those of v4_bf16, whose flags are the same: see dispatch.cpp.
const KernelTable kTable = {
    attend_item, merge_splits, clear_rows, nullptr, nullptr, nullptr,         nullptr,
    nullptr,     nullptr,      nullptr,    nullptr, nullptr, &kLatentKernels,
};
#else
const KernelTable kTable = {
    attend_item,     merge_splits,   clear_rows, merge, merge_many, write,           quantize_rows,
    dequantize_rows, transform_rows, move_runs,  score, summarise,  &kLatentKernels,
};
#if defined(__AVX512BF16__)
// Without latent kernels, which multiply pairs.
const KernelTable kTableWithoutPairs = {
    attend_without_pairs, merge_splits,   clear_rows, merge, merge_many, write,   quantize_rows,
    dequantize_rows,      transform_rows, move_runs,  score, summarise,  nullptr,
};
#endif
#endif

}  // namespace pagecore::cpu::PC_ISA
