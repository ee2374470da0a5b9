// Sparse selection: checks, division of the work among threads, and the selection itself.
//
// select() finds the budget-th best score of a row by a radix select: digits of 11, 11 and 10 bits, each among the keys
// that agree with the digits before it. One ascending pass then takes all better scores and the first of the equal
// ones. Cost: O(width) a row.
#include "pagecore/ops/cpu/sparse/select.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Entries that one thread scores at a time, for the heads whose query rows fit into the L1 cache.
constexpr int64_t kScoredTogether = 128;
constexpr int64_t kQueryRowFloats = 8 << 10;

// Buffers that the calling thread keeps between calls.
struct SelectionWorkspace {
  CheckedBatch batch;
  std::vector<float> rows;
  std::vector<int32_t> sequences;
  std::vector<uint32_t> keys;
};

SelectionWorkspace& selection_workspace() {
  static thread_local SelectionWorkspace mine;
  return mine;
}

// ---- selection of one row

// The order of floats as that of integers. NaN and -inf become 0, which is never selected. Free of branches, so that it
// vectorises.
uint32_t order_key(float score) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes 0
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return score > -INFINITY ? bits ^ (sign | 0x80000000u) : 0;
}

struct Cut {
  uint32_t key;   // larger keys are selected
  int64_t equal;  // and this number of the first equal ones
};

// Finds the digit of `bits` bits at `shift` that the cut has, given that `wanted` of the keys are selected, and keeps
// the keys with that digit. Selected keys with a larger digit are subtracted from `wanted`.
uint32_t find_digit(uint32_t* keys, int64_t& count, int shift, int bits, int64_t& wanted) {
  constexpr int kMostBits = 11;
  int32_t histogram[1 << kMostBits] = {};
  const uint32_t mask = (1u << bits) - 1;
  for (int64_t i = 0; i < count; ++i) ++histogram[keys[i] >> shift & mask];
  uint32_t digit = mask;
  while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = keys[i];
    keys[kept] = key;
    kept += (key >> shift & mask) == digit;
  }
  count = kept;
  return digit << shift;
}

// The cut that selects `budget` of the keys, or all of them that can be selected. `scratch` has room for the keys.
Cut find_cut(const uint32_t* keys, int64_t count, int64_t budget, uint32_t* scratch) {
  std::copy_n(keys, count, scratch);
  int64_t wanted = budget;
  const uint32_t high = find_digit(scratch, count, 21, 11, wanted);
  const uint32_t middle = find_digit(scratch, count, 10, 11, wanted);
  const uint32_t low = find_digit(scratch, count, 0, 10, wanted);
  return {high | middle | low, wanted};
}

// Writes `first` + i for the first `budget` keys that the cut selects; returns their number.
int64_t take_cut(const uint32_t* keys, int64_t count, Cut cut, int64_t budget, int64_t first, int32_t* out) {
  int64_t taken = 0;
  for (int64_t i = 0; i < count && taken < budget; ++i) {
    const uint32_t key = keys[i];
    const bool ties = key == cut.key && key != 0 && cut.equal > 0;
    out[taken] = static_cast<int32_t>(first + i);
    taken += key > cut.key || ties;
    cut.equal -= ties;
  }
  return taken;
}

int64_t take_all(int64_t begin, int64_t end, int32_t* out) {
  for (int64_t i = begin; i < end; ++i) out[i - begin] = static_cast<int32_t>(i);
  return end - begin;
}

// `scratch` has room for 2 * width keys.
void select_row(const SelectArgs& args, int64_t row, uint32_t* scratch) {
  const int64_t length = args.lens.at(row / args.rows_per_length);
  const float* scores = args.scores + row * args.width;
  int32_t* out = args.positions + row * args.capacity;
  int64_t taken = 0;
  if (length < args.threshold) {
    taken = take_all(0, length, out);
  } else {
    const int64_t first = std::min(args.sinks, length), last = std::max(length - args.recent, first);
    taken = take_all(0, first, out);
    if (args.budget > 0 && first < last) {
      const int64_t count = last - first;
      for (int64_t i = 0; i < count; ++i) scratch[i] = order_key(scores[first + i]);
      const Cut cut = find_cut(scratch, count, args.budget, scratch + args.width);
      taken += take_cut(scratch, count, cut, args.budget, first, out + taken);
    }
    taken += take_all(last, length, out + taken);
  }
  args.counts[row] = static_cast<int32_t>(taken);
  std::fill(out + taken, out + args.capacity, -1);
}

// Lists the sequence of each query; -1 for padding.
void list_sequences(SelectionWorkspace& work, int64_t num_queries) {
  if (static_cast<int64_t>(work.sequences.size()) < num_queries)
    work.sequences.resize(static_cast<size_t>(num_queries));
  std::fill(work.sequences.begin(), work.sequences.end(), -1);
  const int32_t* cu = work.batch.cu_query_lens();
  for (int64_t i = 0; i < work.batch.num_sequences(); ++i) {
    std::fill(work.sequences.begin() + cu[i], work.sequences.begin() + cu[i + 1], static_cast<int32_t>(i));
  }
}

}  // namespace

void select(const SelectArgs& args, int64_t num_threads) {
  for (int64_t i = 0; i < args.lens.size; ++i) {
    const int64_t length = args.lens.at(i);
    PC_EXPECTS(length >= 0 && length <= args.width, ShapeError, "lens[", i, "] is ", length, " and the rows have ",
               args.width, " scores; expected 0 to ", args.width);
  }
  const double bytes = static_cast<double>(args.num_rows) * static_cast<double>(args.width) * 16.0;
  const int64_t threads = worthwhile_threads(bytes / kBytesPerUs, num_threads);
  std::vector<uint32_t>& keys = selection_workspace().keys;
  if (static_cast<int64_t>(keys.size()) < 2 * args.width * threads) {
    keys.resize(static_cast<size_t>(2 * args.width * threads));
  }
  uint32_t* scratch = keys.data();
  parallel_for(args.num_rows, threads,
               [&](int64_t row, int64_t worker) noexcept { select_row(args, row, scratch + 2 * args.width * worker); });
}

void score(const ScoreArgs& args, const ScoreBatch& given, int64_t num_threads) {
  const KernelTable& table = kernels();
  SelectionWorkspace& work = selection_workspace();
  AttentionArgs batch;
  batch.query = args.query;
  batch.key = args.high;
  batch.key.block_size = given.block_size;
  batch.value = batch.key;
  batch.table = args.table;
  batch.seq_lens = given.seq_lens;
  batch.rows = given.rows;
  batch.cu_query_lens = given.cu_query_lens;
  batch.causal = given.causal;
  work.batch.check(batch);
  const int64_t heads = args.high.num_heads, group = args.query.num_heads / heads;
  const int64_t parts = (args.width + kScoredTogether - 1) / kScoredTogether;
  const bool scores_blocks = args.low.data != nullptr;
  const int64_t unit = scores_blocks ? given.block_size : 1;
  const auto row_bytes = static_cast<double>(args.high.dim * size_of(args.high.type) * (scores_blocks ? 2 : 1));
  const double us = static_cast<double>(args.query.num_tokens * heads * args.width) * row_bytes / kBytesPerUs;
  const int64_t threads = worthwhile_threads(us, num_threads), each = 2 * group * padded(args.high.dim);
  const int64_t together = std::clamp<int64_t>(kQueryRowFloats / each, 1, heads), floats = each * together;
  const int64_t shares = (heads + together - 1) / together;
  if (static_cast<int64_t>(work.rows.size()) < floats * threads)
    work.rows.resize(static_cast<size_t>(floats * threads));
  float* rows = work.rows.data();
  list_sequences(work, args.query.num_tokens);
  const CheckedBatch& checked = work.batch;
  const int32_t* sequences = work.sequences.data();
  parallel_for(args.query.num_tokens * parts * shares, threads, [&](int64_t i, int64_t worker) noexcept {
    const int64_t query = i / (parts * shares), sequence = sequences[query], head = i % shares * together;
    const int64_t begin = i / shares % parts * kScoredTogether, end = std::min(begin + kScoredTogether, args.width);
    ScorePart part{query, head, std::min(head + together, heads), 0, begin, end, 0};
    if (sequence >= 0) {
      const int64_t length = checked.seq_lens()[sequence];
      const int64_t before = length - (checked.cu_query_lens()[sequence + 1] - query);  // the query's position
      // A token's own label is not scored, and later ones are not visible.
      const int64_t tokens = !scores_blocks ? before : given.causal ? before + 1 : length;
      part.row = checked.rows()[sequence];
      part.visible = (std::clamp<int64_t>(tokens, 0, length) + unit - 1) / unit;
    }
    table.score(args, part, rows + worker * floats);
  });
}

void summarise(const SummaryArgs& args, int64_t num_threads) {
  const KernelTable& table = kernels();
  const int64_t heads = args.key.num_heads;
  const int64_t bytes = args.slots.size * heads * args.key.dim * size_of(args.key.type);
  const int64_t parts = std::min(heads, threads_to_move(2 * bytes, num_threads));
  parallel_for(parts, parts, [&](int64_t part, int64_t) noexcept {
    table.summarise(args, heads * part / parts, heads * (part + 1) / parts);
  });
}

}  // namespace pagecore::cpu
