// Which instruction set the kernels use: the widest that the machine has, unless PAGECORE_ISA or set_isa says
// otherwise.
#pragma once

#include <string>
#include <vector>

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu {

// The kernels in use. Raises UnsupportedOption when PAGECORE_ISA names what this machine or build has not.
[[nodiscard]] const KernelTable& kernels();

[[nodiscard]] const char* isa();

// A name of available_isas(), or "" for what PAGECORE_ISA or else the machine says. Changes nothing when it raises.
void set_isa(const std::string& name);

// The widest first.
[[nodiscard]] std::vector<std::string> available_isas();

}  // namespace pagecore::cpu
