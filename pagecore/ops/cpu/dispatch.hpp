// Dispatch of the kernels by instruction set: the widest that the machine supports and that is not slower than another,
// unless PAGECORE_ISA or set_isa selects one.
#pragma once

#include <string>
#include <vector>

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu {

// The kernels in use. Raises UnsupportedOption if PAGECORE_ISA names an instruction set that is not available on this
// machine or in this build.
[[nodiscard]] const KernelTable& kernels();

[[nodiscard]] const char* isa();

// Selects an entry of available_isas(), or "" for the default. Changes nothing when it raises.
void set_isa(const std::string& name);

// True if this processor reads contiguous rows fastest page by page (kernels/tiles/prefetch.hpp).
[[nodiscard]] bool reads_by_pages();

// Available instruction sets, widest first.
[[nodiscard]] std::vector<std::string> available_isas();

}  // namespace pagecore::cpu
