// Sparse selection: checks, division of the work among threads, and the selection itself.
//
// select() finds the budget-th best score of a row by a radix select: three passes over keys of 32 bits, 11 bits each,
// then one ascending pass that takes all better scores and the first of the equal ones. Cost: O(width) a row.
#include "pagecore/ops/cpu/select.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/batch.hpp"
#include "pagecore/ops/cpu/cost.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads.hpp"

namespace pagecore::cpu {
namespace {

// Entries that one thread scores at a time.
constexpr int64_t kScoredTogether = 512;

// Buffers that the calling thread keeps between calls.
struct Workspace {
  CheckedBatch batch;
  std::vector<float> rows;
  std::vector<int32_t> sequences;
};

Workspace& workspace() {
  static thread_local Workspace mine;
  return mine;
}

// ---- selection of one row

constexpr int kPassBits = 11;
constexpr int kShifts[] = {21, 10, 0};  // the last pass has 10 bits

// The order of floats as that of integers. NaN and -inf become 0, which is never selected.
uint32_t order_key(float score) {
  if (!(score > -INFINITY)) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes 0
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

struct Cut {
  uint32_t key;   // larger keys are selected
  int64_t equal;  // and this number of the first equal ones
};

// The cut that selects `budget` scores, or all that can be selected.
Cut find_cut(const float* scores, int64_t count, int64_t budget) {
  uint32_t prefix = 0;
  int64_t wanted = budget;
  int high = 32;
  for (const int shift : kShifts) {
    int64_t histogram[1 << kPassBits] = {};
    const uint32_t mask = (1u << (high - shift)) - 1;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t key = order_key(scores[i]);
      const bool listed = key != 0 && (high == 32 || key >> high == prefix >> high);
      histogram[key >> shift & mask] += listed;
    }
    int64_t bucket = mask;
    while (bucket > 0 && histogram[bucket] < wanted) wanted -= histogram[bucket--];
    prefix |= static_cast<uint32_t>(bucket) << shift;
    high = shift;
  }
  return {prefix, wanted};
}

// Appends the positions [begin, end) that the cut selects; returns the number.
int64_t take_cut(const float* scores, int64_t begin, int64_t end, Cut cut, int32_t* out) {
  int64_t taken = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t key = order_key(scores[i]);
    if (key == 0 || key < cut.key) continue;
    if (key == cut.key && cut.equal-- <= 0) continue;
    out[taken++] = static_cast<int32_t>(i);
  }
  return taken;
}

int64_t take_all(int64_t begin, int64_t end, int32_t* out) {
  for (int64_t i = begin; i < end; ++i) out[i - begin] = static_cast<int32_t>(i);
  return end - begin;
}

void select_row(const SelectArgs& args, int64_t row) {
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
      const Cut cut = find_cut(scores + first, last - first, args.budget);
      taken += take_cut(scores, first, last, cut, out + taken);
    }
    taken += take_all(last, length, out + taken);
  }
  args.counts[row] = static_cast<int32_t>(taken);
  std::fill(out + taken, out + args.capacity, -1);
}

// Lists the sequence of each query; -1 for padding.
void list_sequences(Workspace& work, int64_t num_queries) {
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
  parallel_for(args.num_rows, worthwhile_threads(bytes / kBytesPerUs, num_threads),
               [&](int64_t row, int64_t) noexcept { select_row(args, row); });
}

void score(const ScoreArgs& args, const ScoreBatch& given, int64_t num_threads) {
  const KernelTable& table = kernels();
  Workspace& work = workspace();
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
  const int64_t threads = worthwhile_threads(us, num_threads), floats = 2 * group * padded(args.high.dim);
  if (static_cast<int64_t>(work.rows.size()) < floats * threads)
    work.rows.resize(static_cast<size_t>(floats * threads));
  float* rows = work.rows.data();
  list_sequences(work, args.query.num_tokens);
  const CheckedBatch& checked = work.batch;
  const int32_t* sequences = work.sequences.data();
  parallel_for(args.query.num_tokens * heads * parts, threads, [&](int64_t i, int64_t worker) noexcept {
    const int64_t query = i / (heads * parts), sequence = sequences[query], begin = i % parts * kScoredTogether;
    ScorePart part{query, i / parts % heads, 0, begin, std::min(begin + kScoredTogether, args.width), 0};
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
  parallel_for(heads, threads_to_move(2 * bytes, num_threads),
               [&](int64_t head, int64_t) noexcept { table.summarise(args, head); });
}

}  // namespace pagecore::cpu
