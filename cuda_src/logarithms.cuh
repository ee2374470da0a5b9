// From powers and logarithms of e to those of 2, which the hardware has, and back.
#pragma once

namespace pagecore {

constexpr float kLog2OfE = 1.44269504f;
constexpr float kLogOf2 = 0.693147181f;

}  // namespace pagecore
