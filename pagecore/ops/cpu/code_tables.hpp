// The numbers of 4-bit codes as bfloat16, times the scale of their group or less their zero point. All are exact.
#pragma once

#include <cstdint>

namespace pagecore::cpu {

// The numbers of the 16 codes, as words, and as the low and the high bytes of these words.
struct CodeTable {
  alignas(32) uint16_t words[16];
  uint8_t low[16];
  uint8_t high[16];
};

struct CodeTables {
  CodeTable ue8m0[256];       // e2m1 times a UE8M0 scale
  CodeTable e4m3[256];        // e2m1 times an e4m3 scale
  CodeTable zero_points[16];  // code - zero point
  alignas(64) uint16_t integers[32];  // i - 15
  float ue8m0_numbers[256];
  float e4m3_numbers[256];
};

extern const CodeTables kCodeTables;

}  // namespace pagecore::cpu
