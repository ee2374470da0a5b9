// The indexer of sparse attention: scores, the best positions, and their slots.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/latent/latent.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/scratch_buffer.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

constexpr double kIndexFlopsPerUs = 200e3;
// Keys of a unit of work; the query is loaded once for them.
constexpr int64_t kIndexKeys = 4096;

struct IndexWorkspace {
  CheckedBatch batch;
  std::vector<IndexScoreItem> items;
  ScratchBuffer scratch;
};

IndexWorkspace& index_workspace() {
  static thread_local IndexWorkspace mine;
  return mine;
}

// Fills the workspace with items; returns the pairs of a query token and a key.
double list_items(const IndexScoreCall& call, IndexWorkspace& work) {
  const CheckedBatch& batch = work.batch;
  double pairs = 0.0;
  work.items.clear();
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t first = batch.cu_query_lens()[i], end = batch.cu_query_lens()[i + 1], length = batch.seq_lens()[i];
    for (int64_t token = first; token < end; ++token) {
      const int64_t visible = call.causal ? std::max<int64_t>(0, length - (end - 1 - token)) : length;
      pairs += static_cast<double>(visible);
      for (int64_t begin = 0; begin < call.args.width; begin += kIndexKeys) {
        const int64_t until = std::min(begin + kIndexKeys, call.args.width);
        work.items.push_back({token, batch.rows()[i], begin, until, visible});
      }
    }
  }
  for (int64_t token = batch.num_queries(); token < call.args.query.num_tokens; ++token) {
    work.items.push_back({token, 0, 0, call.args.width, 0});
  }
  return pairs;
}

// Orders better scores first, and equal scores by position.
struct Better {
  const float* scores;
  bool operator()(int32_t a, int32_t b) const { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); }
};

void select_row(const float* scores, int64_t length, int64_t k, int32_t* out, std::vector<int32_t>& order) {
  order.clear();
  for (int64_t i = 0; i < length; ++i) {
    if (scores[i] > -std::numeric_limits<float>::infinity()) order.push_back(static_cast<int32_t>(i));
  }
  const int64_t found = std::min<int64_t>(k, std::ssize(order));
  const Better better{scores};
  if (found < std::ssize(order)) std::nth_element(order.begin(), order.begin() + found, order.end(), better);
  std::sort(order.begin(), order.begin() + found, better);
  std::copy_n(order.begin(), found, out);
  std::fill(out + found, out + k, -1);
}

}  // namespace

void index_scores(const IndexScoreCall& call, int64_t num_threads) {
  IndexWorkspace& work = index_workspace();
  const IndexScoreArgs& args = call.args;
  AttentionArgs lists;
  lists.query = args.query;
  lists.key = args.keys;
  lists.key.num_heads = 1;
  lists.value = lists.key;
  lists.table = args.table;
  lists.seq_lens = call.seq_lens;
  lists.rows = call.rows;
  lists.cu_query_lens = call.cu_query_lens;
  lists.causal = call.causal;
  work.batch.check(lists);
  for (int64_t i = 0; i < work.batch.num_sequences(); ++i) {
    PC_EXPECTS(work.batch.seq_lens()[i] <= args.width, ShapeError, "seq_lens[", i, "] is ", work.batch.seq_lens()[i],
               " and out has ", args.width, " columns; it needs one for each key");
  }
  const double flops = list_items(call, work) * static_cast<double>(2 * args.query.dim * args.query.num_heads);
  const int64_t workers =
      std::clamp<int64_t>(std::ssize(work.items), 1, worthwhile_threads(flops / kIndexFlopsPerUs, num_threads));
  LatentScratch unused;
  const int64_t floats = carve_latent(0, args.query.num_heads, kPadding, pair_padded(args.query.dim), unused);
  const int64_t each = (floats + 1023) / 1024 * 1024;
  float* scratch = work.scratch.reserve(each * workers);
  const LatentKernels& table = *kernels().latent;
  parallel_for(std::ssize(work.items), workers, [&](int64_t i, int64_t worker) noexcept {
    table.score(args, work.items[static_cast<size_t>(i)], scratch + worker * each);
  });
}

void select_topk(const TopkArgs& args, int64_t num_threads) {
  for (int64_t i = 0; args.lens.data != nullptr && i < args.num_rows; ++i) {
    PC_EXPECTS(args.lens.at(i) >= 0 && args.lens.at(i) <= args.width, ShapeError, "lens[", i, "] is ", args.lens.at(i),
               "; a row of scores has ", args.width, " entries");
  }
  constexpr double kScoresPerUs = 500.0;
  const double us = static_cast<double>(args.num_rows * args.width) / kScoresPerUs;
  num_threads = worthwhile_threads(us, num_threads);
  std::vector<std::vector<int32_t>> orders(static_cast<size_t>(num_threads));
  for (auto& order : orders) order.reserve(static_cast<size_t>(args.width));
  parallel_for(args.num_rows, num_threads, [&](int64_t row, int64_t worker) noexcept {
    const int64_t named = args.lens.data == nullptr ? args.width : args.lens.at(row);
    const int64_t length = std::clamp<int64_t>(named, 0, args.width);
    select_row(args.scores + row * args.score_stride, length, args.k, args.out + row * args.k,
               orders[static_cast<size_t>(worker)]);
  });
}

void slots_of(const SlotsArgs& args, int64_t num_threads) {
  CheckedBatch batch;
  AttentionArgs lists;
  lists.query.num_tokens = args.num_tokens;
  lists.key.block_size = args.block_size;
  lists.table = args.table;
  std::vector<int32_t> lens(static_cast<size_t>(args.num_sequences));
  lists.seq_lens = {reinterpret_cast<const char*>(lens.data()), args.num_sequences, 4, false};
  lists.rows = args.rows;
  lists.cu_query_lens = args.cu_query_lens;
  batch.check_lists(lists);
  const int64_t reach = args.table.width * args.block_size;
  constexpr int64_t kSlotMax = std::numeric_limits<int32_t>::max();
  const auto visit = [&](int64_t sequence, auto&& put) {
    const Indices blocks = args.table.row(batch.rows()[sequence]);
    for (int64_t token = batch.cu_query_lens()[sequence]; token < batch.cu_query_lens()[sequence + 1]; ++token) {
      for (int64_t j = 0; j < args.width; ++j) put(blocks, token, j, args.positions[token * args.width + j]);
    }
  };
  for (int64_t i = 0; i < args.num_sequences; ++i) {
    visit(i, [&](const Indices& blocks, int64_t token, int64_t j, int64_t position) {
      if (position < 0) return;
      PC_EXPECTS(position < reach, ShapeError, "positions[", token, ", ", j, "] is ", position,
                 " and the block table holds ", reach, " tokens a row; use -1 for no position");
      const int64_t block = blocks.at(position / args.block_size);
      PC_EXPECTS(block >= 0 && block <= kSlotMax / args.block_size - 1, InvalidBlock, "block_table entry ",
                 position / args.block_size, " of sequence ", i, " is ", block, "; its slots must fit int32");
    });
  }
  std::fill(args.out, args.out + args.num_tokens * args.width, -1);
  const double us = static_cast<double>(args.num_tokens * args.width) / 500.0;
  parallel_for(args.num_sequences, worthwhile_threads(us, num_threads), [&](int64_t i, int64_t) noexcept {
    visit(i, [&](const Indices& blocks, int64_t token, int64_t j, int64_t position) {
      if (position < 0) return;
      const int64_t block = position / args.block_size;
      args.out[token * args.width + j] =
          static_cast<int32_t>(blocks.at(block) * args.block_size + position % args.block_size);
    });
  });
}

}  // namespace pagecore::cpu
