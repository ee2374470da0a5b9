// The Hadamard transform of rows on the host.
#pragma once

#include <cstdint>

#include "pagecore/ops/hadamard_rows.hpp"

namespace pagecore::cpu {

// The caller has checked the arrays.
void hadamard(const HadamardRows& rows, int64_t num_threads);

}  // namespace pagecore::cpu
