// The rows of one key head, and what they have.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct HeadRows {
  int64_t first;  // of the head's
  int64_t count;
  const int32_t* low;  // [rows], the keys of the tile that each attends to
  const int32_t* high;
  const float* query;           // [rows, query_stride], or
  const uint16_t* query_pairs;  // the same of bfloat16
  int64_t query_stride;
  float* scores;      // [rows, 64], then the weights
  uint16_t* weights;  // [rows, 64], bfloat16
  float* acc;         // [rows, acc_stride]
  int64_t acc_stride;
  const float* factor;  // [rows], for what acc held before
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
