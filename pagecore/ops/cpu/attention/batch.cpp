#include "pagecore/ops/cpu/attention/batch.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

template <typename T>
void grow(std::vector<T>& values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(static_cast<size_t>(size));
}

template <typename Id>
bool all_below(const Indices& ids, int64_t begin, int64_t end, int64_t limit) {
  const Id* id = reinterpret_cast<const Id*>(ids.data);
  bool outside = false;
  for (int64_t i = begin; i < end; ++i) outside |= id[i] < 0 || id[i] >= limit;
  return !outside;
}

std::string described(int64_t left, int64_t right, int64_t sinks) {
  if (left < -1) return concat("chunk ", chunk_of_left(left));
  if (sinks > 0) return concat("window (", left, ", ", right, ") with ", sinks, " sink tokens");
  return concat("window (", left, ", ", right, ")");
}

Window window_of(const AttentionArgs& args) {
  return make_window(args.causal, args.window_left, args.window_right, args.sink_tokens);
}

}  // namespace

void CheckedBatch::check(const AttentionArgs& args) {
  check_lists(args);
  for (int64_t i = 0; i < num_sequences_; ++i) check_blocks(args, i);
}

void CheckedBatch::check_lists(const AttentionArgs& args) {
  num_sequences_ = args.seq_lens.size;
  check_queries(args);
  check_lengths(args);
  check_rows(args);
  check_sealed(args);
  check_mask(args);
  check_tree(args);
  check_selection(args);
}

void CheckedBatch::check_queries(const AttentionArgs& args) {
  grow(cu_query_lens_, num_sequences_ + 1);
  const Indices& cu = args.cu_query_lens;
  const int64_t tokens = args.query.num_tokens;
  if (cu.data == nullptr) {
    PC_EXPECTS(num_sequences_ <= tokens, ShapeError, "seq_lens has ", num_sequences_, " sequences and query has ",
               tokens, " rows; without cu_query_lens there must be one query for each sequence");
    for (int64_t i = 0; i <= num_sequences_; ++i) cu_query_lens_[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    return;
  }
  PC_EXPECTS(cu.size == num_sequences_ + 1, ShapeError, "cu_query_lens has ", cu.size, " entries for ", num_sequences_,
             " sequences; it must have one more than seq_lens");
  int64_t before = 0;
  for (int64_t i = 0; i <= num_sequences_; ++i) {
    const int64_t at = cu.at(i);
    PC_EXPECTS(i > 0 || at == 0, ShapeError, "cu_query_lens starts at ", at, "; it must start at 0");
    PC_EXPECTS(at >= before, ShapeError, "cu_query_lens falls from ", before, " to ", at, " at ", i,
               "; it must never fall");
    PC_EXPECTS(at <= tokens && at <= kMaxTokens, ShapeError, "cu_query_lens[", i, "] is ", at, " and query has ",
               tokens, " rows; every query must have its row, and query is [num_tokens, num_query_heads, head_dim]");
    before = at;
    cu_query_lens_[static_cast<size_t>(i)] = static_cast<int32_t>(at);
  }
}

void CheckedBatch::check_lengths(const AttentionArgs& args) {
  grow(seq_lens_, num_sequences_);
  for (int64_t i = 0; i < num_sequences_; ++i) {
    const int64_t length = args.seq_lens.at(i);
    PC_EXPECTS(length >= 0 && length <= kMaxTokens, ShapeError, "seq_lens[", i, "] is ", length, "; lengths are 0 to ",
               kMaxTokens);
    PC_EXPECTS((length + args.key.block_size - 1) / args.key.block_size <= args.table.width, ShapeError, "seq_lens[", i,
               "] is ", length, ", which is more than ", args.table.width, " blocks of ", args.key.block_size,
               " hold; the block table is too narrow");
    seq_lens_[static_cast<size_t>(i)] = static_cast<int32_t>(length);
  }
}

void CheckedBatch::check_rows(const AttentionArgs& args) {
  grow(rows_, num_sequences_);
  const bool given = args.rows.data != nullptr;
  PC_EXPECTS(!given || args.rows.size == num_sequences_, ShapeError, "rows has ", args.rows.size, " entries for ",
             num_sequences_, " sequences; it needs one for each");
  for (int64_t i = 0; i < num_sequences_; ++i) {
    const int64_t row = given ? args.rows.at(i) : i;
    PC_EXPECTS(row >= 0 && row < args.table.num_rows && row <= kMaxTokens, InvalidSequence, "sequence ", i, " is row ",
               row, " of a block table of ", args.table.num_rows, " rows; rows start at 0");
    rows_[static_cast<size_t>(i)] = static_cast<int32_t>(row);
  }
}

void CheckedBatch::check_mask(const AttentionArgs& args) {
  if (args.mask_size < 0) return;
  grow(mask_starts_, num_sequences_);
  int64_t total = 0;
  for (int64_t i = 0; i < num_sequences_; ++i) {
    const auto at = static_cast<size_t>(i);
    mask_starts_[at] = total;
    const int64_t queries = cu_query_lens_[at + 1] - cu_query_lens_[at];
    total += queries * seq_lens_[at];
    PC_EXPECTS(total <= args.mask_size, ShapeError, "mask has ", args.mask_size, " entries and the first ", i + 1,
               " sequences need ", total, "; it holds [query_len, seq_len] of every sequence");
  }
  PC_EXPECTS(total == args.mask_size, ShapeError, "mask has ", args.mask_size, " entries and the batch needs ", total,
             "; it holds [query_len, seq_len] of every sequence");
}

// Returns true if the mask lets any query of the sequence attend to any key in [begin, end).
bool CheckedBatch::attended(const AttentionArgs& args, int64_t sequence, int64_t begin, int64_t end) const {
  const auto at = static_cast<size_t>(sequence);
  const Window window = window_of(args);
  const int64_t length = seq_lens_[at], queries = cu_query_lens_[at + 1] - cu_query_lens_[at];
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t position = length - queries + query;
    const uint8_t* mask = args.mask + mask_starts_[at] + query * length;
    for (const KeyRange& keys :
         {sink_keys(window, position, length), attended_keys(window, position, position, length)}) {
      for (int64_t key = std::max(begin, keys.begin); key < std::min(end, keys.end); ++key) {
        if (mask[key] != 0) return true;
      }
    }
  }
  return false;
}

void CheckedBatch::check_blocks(const AttentionArgs& args, int64_t sequence) const {
  const auto at = static_cast<size_t>(sequence);
  const int64_t length = seq_lens_[at], queries = cu_query_lens_[at + 1] - cu_query_lens_[at];
  if (queries == 0) return;
  const Window window = window_of(args);
  const KeyRange keys = attended_keys(window, length - queries, length - 1, length);
  if (has_selection_ && keys.begin < keys.end) return check_selected_blocks(args, sequence, keys);
  if (has_selection_) return;
  check_range(args, sequence, sink_keys(window, length - 1, length));
  check_range(args, sequence, keys);
}

void CheckedBatch::check_range(const AttentionArgs& args, int64_t sequence, const KeyRange& keys) const {
  if (keys.begin == keys.end) return;
  const auto at = static_cast<size_t>(sequence);
  const int64_t sealed = has_sealed_ ? sealed_lens_[at] : 0;
  if (keys.begin < sealed && sealed < keys.end) {
    check_range(args, sequence, {keys.begin, sealed});
    return check_range(args, sequence, {sealed, keys.end});
  }
  const auto [blocks, limit, name] = blocks_of(args, sequence, keys.begin);
  const int64_t size = args.key.block_size, first = keys.begin / size, last = (keys.end - 1) / size;
  if (blocks.wide ? all_below<int64_t>(blocks, first, last + 1, limit)
                  : all_below<int32_t>(blocks, first, last + 1, limit)) {
    return;
  }
  for (int64_t i = first; i <= last; ++i) {
    const int64_t block = blocks.at(i);
    if (block >= 0 && block < limit) continue;
    // Kernels read block 0 in place of a block that the mask hides, which requires the cache to have a block.
    if (limit > 0 && args.mask_size >= 0 && !attended(args, sequence, i * size, (i + 1) * size)) continue;
    fail(ErrorKind::InvalidBlock, name, "[", rows_[at], ", ", i, "] is ", block, " and the cache has ", limit,
         " blocks; sequence ", sequence, " attends to it");
  }
}

void CheckedBatch::check_plan(const AttentionArgs& args, const PlanView& plan) const {
  constexpr const char* kRemedy = "; call plan_attention for this batch";
  PC_EXPECTS(plan.num_query_heads == args.query.num_heads && plan.num_kv_heads == args.key.num_heads, ShapeError,
             "the plan is for ", plan.num_query_heads, "/", plan.num_kv_heads, " heads and the call has ",
             args.query.num_heads, "/", args.key.num_heads, kRemedy);
  const Window planned = make_window(plan.causal, plan.window_left, plan.window_right, plan.sink_tokens);
  const Window wanted = window_of(args);
  PC_EXPECTS(planned.left == wanted.left && planned.right == wanted.right && planned.sinks == wanted.sinks, ShapeError,
             "the plan is for causal=", plan.causal, " and ",
             described(plan.window_left, plan.window_right, plan.sink_tokens), ", the call has causal=", args.causal,
             " and ", described(args.window_left, args.window_right, args.sink_tokens), kRemedy);
  PC_EXPECTS(args.tree.bits == nullptr || wanted.left == -1 || plan.tree, ShapeError, "the call has a tree_mask and ",
             described(args.window_left, args.window_right, args.sink_tokens),
             ", and the plan was made without tree; call plan_attention with tree=True");
  PC_EXPECTS(plan.num_sequences == num_sequences_, ShapeError, "the plan is for ", plan.num_sequences,
             " sequences and the batch has ", num_sequences_, kRemedy);
  PC_EXPECTS(std::equal(seq_lens(), seq_lens() + num_sequences_, plan.seq_lens), ShapeError,
             "the plan was made for other seq_lens", kRemedy);
  PC_EXPECTS(std::equal(cu_query_lens(), cu_query_lens() + num_sequences_ + 1, plan.cu_query_lens), ShapeError,
             "the plan was made for other cu_query_lens", kRemedy);
}

void check_attention(const AttentionArgs& args) { CheckedBatch().check(args); }

}  // namespace pagecore::cpu
