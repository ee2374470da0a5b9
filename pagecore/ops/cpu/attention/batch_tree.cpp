// Checks of a tree mask, and the position of each of its tokens.
#include <bit>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"

namespace pagecore::cpu {
namespace {

constexpr int64_t kWordBits = 64;

// Returns the highest set bit of a row, or -1.
int64_t highest_bit(const uint64_t* row, int64_t words) {
  for (int64_t word = words - 1; word >= 0; --word) {
    if (row[word] != 0) return kWordBits * word + kWordBits - 1 - std::countl_zero(row[word]);
  }
  return -1;
}

int64_t count_bits(const uint64_t* row, int64_t words) {
  int64_t count = 0;
  for (int64_t word = 0; word < words; ++word) count += std::popcount(row[word]);
  return count;
}

}  // namespace

void CheckedBatch::check_tree(const AttentionArgs& args) {
  has_tree_ = args.tree.bits != nullptr;
  if (!has_tree_) return;
  if (std::ssize(tree_positions_) < args.query.num_tokens) {
    tree_positions_.resize(static_cast<size_t>(args.query.num_tokens));
  }
  const int64_t room = kWordBits * args.tree.words;
  for (int64_t i = 0; i < num_sequences_; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t queries = cu_query_lens_[at + 1] - cu_query_lens_[at];
    PC_EXPECTS(queries <= room, ShapeError, "sequence ", i, " has ", queries, " new tokens and tree_mask ",
               args.tree.words, " words of 64 bits for each token; give it ", (queries + kWordBits - 1) / kWordBits);
    PC_EXPECTS(queries <= seq_lens_[at], ShapeError, "sequence ", i, " has ", queries, " new tokens and seq_lens[", i,
               "] is ", seq_lens_[at], "; with a tree_mask the length includes the new tokens");
    for (int64_t index = 0; index < queries; ++index) check_tree_token(args, i, index);
  }
}

void CheckedBatch::check_tree_token(const AttentionArgs& args, int64_t sequence, int64_t index) {
  const auto at = static_cast<size_t>(sequence);
  const int64_t queries = cu_query_lens_[at + 1] - cu_query_lens_[at], token = cu_query_lens_[at] + index;
  const int64_t base = seq_lens_[at] - queries;
  const uint64_t* row = args.tree.bits + token * args.tree.words;
  const int64_t highest = highest_bit(row, args.tree.words);
  PC_EXPECTS(highest < queries, ShapeError, "tree_mask[", token, "] has bit ", highest, " and sequence ", sequence,
             " has ", queries, " new tokens; use bits 0 to ", queries - 1);
  PC_EXPECTS(highest <= index, ShapeError, "tree_mask[", token, "] has bit ", highest, " and is the row of token ",
             index, " of sequence ", sequence,
             "; list parents before their children, so that a token attends to no later "
             "one");
  PC_EXPECTS(highest == index, ShapeError, "tree_mask[", token, "] lacks bit ", index,
             ", that of the token itself; every token attends to itself");
  int64_t position = base + count_bits(row, args.tree.words) - 1;
  if (args.tree.positions.data != nullptr) {
    position = args.tree.positions.at(token);
    PC_EXPECTS(position >= base && position <= base + index, ShapeError, "positions[", token, "] is ", position,
               " and the token is number ", index, " of the new tokens of sequence ", sequence, ", which begin at ",
               base, "; use ", base, " to ", base + index);
  }
  tree_positions_[static_cast<size_t>(token)] = static_cast<int32_t>(position);
}

}  // namespace pagecore::cpu
