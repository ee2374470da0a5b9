// Arguments of the kernels for sparse selection. Plain structs: see ops/args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"

namespace pagecore::cpu {

// Scores of blocks from their bounds, or of tokens from their labels. Planes are Caches; bounds have one "token" a
// block.
//
//   bounds   high[block, 0, head, dim], low alike     score = max or mean over the group of sum_d max(q low, q high)
//   labels   high[block, token, head, channels]       score = q[channels] . label, q reduced over the group first
struct ScoreArgs {
  TokenArray query;
  Cache low;  // data is null for labels
  Cache high;
  Table table;
  const int32_t* channels = nullptr;  // labels: [head, channel]
  bool mean = false;                  // average the queries of a group; else the maximum bound, or the largest |q|
  float* scores = nullptr;            // [query, head, width]
  int64_t width = 0;
};

// Entries [begin, end) of one query and some key heads; entries from `visible` on score -inf.
struct ScorePart {
  int64_t query;
  int64_t head_begin;
  int64_t head_end;
  int64_t row;  // of the table
  int64_t begin;
  int64_t end;
  int64_t visible;
};

// Summaries of new keys: bounds of blocks, labels of tokens, or both. Absent planes have no data.
struct SummaryArgs {
  TokenArray key;
  Indices slots;
  int64_t num_blocks = 0;
  int64_t block_size = 1;
  Cache low;  // one "token" a block, as in ScoreArgs
  Cache high;
  Cache label;
  const int32_t* channels = nullptr;  // [head, channel]
};

struct SelectArgs {
  const float* scores = nullptr;  // [num_rows, width]
  int64_t num_rows = 0;
  int64_t width = 0;
  Indices lens;  // one length for each `rows_per_length` rows
  int64_t rows_per_length = 1;
  int64_t budget = 0;
  int64_t sinks = 0;
  int64_t recent = 0;
  int64_t threshold = 0;         // rows that are shorter keep all positions
  int32_t* positions = nullptr;  // [num_rows, capacity]
  int32_t* counts = nullptr;     // [num_rows]
  int64_t capacity = 0;
};

}  // namespace pagecore::cpu
