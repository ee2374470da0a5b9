#include "pagecore/ops/cpu/moves/run_list.hpp"

#include <algorithm>
#include <limits>

#include "pagecore/native/checks.hpp"

namespace pagecore::cpu {
namespace {

constexpr int64_t kNullBlock = 0;
constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

int64_t blocks_of(int64_t length, int64_t block_size) { return length / block_size + (length % block_size != 0); }

int64_t checked_length(const Indices& seq_lens, int64_t i, int64_t width, int64_t block_size) {
  const int64_t length = seq_lens.at(i);
  PC_EXPECTS(length >= 0 && length <= kMaxLength, ShapeError, "seq_lens[", i, "] is ", length, "; lengths are 0 to ",
             kMaxLength);
  PC_EXPECTS(blocks_of(length, block_size) <= width, ShapeError, "seq_lens[", i, "] is ", length,
             ", which is more than ", width, " blocks of ", block_size, " hold; the block table is too narrow");
  return length;
}

int64_t checked_row(const PackedSequences& batch, int64_t i) {
  const int64_t row = batch.rows.data != nullptr ? batch.rows.at(i) : i;
  PC_EXPECTS(row >= 0 && row < batch.table.num_rows, InvalidSequence, "sequence ", i, " is row ", row,
             " of a block table of ", batch.table.num_rows, " rows; rows start at 0");
  return row;
}

// Builds the list of runs; a run that continues the last one on both sides extends it.
class RunList {
 public:
  RunList(std::vector<CopyRun>& runs, Direction direction, const PackedSequences& batch)
      : runs_(runs), direction_(direction), block_size_(batch.block_size), lowest_(batch.lowest) {
    runs_.clear();
  }

  // Adds `count` tokens from `position` of the packed side on, which are at the start of `block`.
  void add(int64_t block, int64_t position, int64_t count) {
    const bool hole = block < lowest_;
    if (hole && direction_ == Direction::Scatter) return;
    if (!hole) copied_ += count;
    if (continues_ && position == position_ && (hole ? hole_ : !hole_ && block == next_block_)) {
      runs_.back().count += count;
    } else if (direction_ == Direction::Gather) {
      runs_.push_back({hole ? kZeros : block, position, count});
    } else {
      runs_.push_back({position, block, count});
    }
    hole_ = hole;
    position_ = position + count;
    next_block_ = block + 1;
    continues_ = hole || count == block_size_;
  }

  [[nodiscard]] int64_t copied() const { return copied_; }

 private:
  std::vector<CopyRun>& runs_;
  Direction direction_;
  int64_t block_size_;
  int64_t lowest_;  // blocks below are holes
  int64_t copied_ = 0;
  bool continues_ = false;  // the last run ends at the end of a block or in a hole
  bool hole_ = false;
  int64_t position_ = 0;
  int64_t next_block_ = 0;
};

}  // namespace

int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size) {
  int64_t total = 0;
  for (int64_t i = 0; i < seq_lens.size; ++i) total += checked_length(seq_lens, i, width, block_size);
  return total;
}

int64_t list_runs(const PackedSequences& batch, Direction direction, std::vector<CopyRun>& runs) {
  RunList list(runs, direction, batch);
  int64_t position = 0;
  for (int64_t i = 0; i < batch.seq_lens.size; ++i) {
    const int64_t length = checked_length(batch.seq_lens, i, batch.table.width, batch.block_size);
    const int64_t row = checked_row(batch, i), needed = blocks_of(length, batch.block_size);
    PC_EXPECTS(length <= batch.num_tokens - position, ShapeError, "seq_lens sum to more than the ", batch.num_tokens,
               " tokens of the packed array; it must have exactly their sum");
    const Indices blocks = batch.table.row(row);
    for (int64_t at = 0; at < needed; ++at) {
      const int64_t block = blocks.at(at);
      PC_EXPECTS(block >= 0 && block < batch.num_blocks, InvalidBlock, "block_table[", row, ", ", at, "] is ", block,
                 " and the cache has ", batch.num_blocks, " blocks; sequence ", i, " has tokens in it");
      const int64_t done = at * batch.block_size, count = std::min(batch.block_size, length - done);
      list.add(block, position + done, count);
    }
    position += length;
  }
  PC_EXPECTS(position == batch.num_tokens, ShapeError, "seq_lens sum to ", position, " and the packed array has ",
             batch.num_tokens, " tokens; it must have exactly their sum");
  return list.copied();
}

int64_t list_pairs(const Indices& sources, const Indices& targets, int64_t num_sources, int64_t num_targets,
                   int64_t lowest, std::vector<CopyRun>& runs) {
  runs.clear();
  const char* hint = lowest > kNullBlock ? " (block 0 is the reserved null block; null_block=False copies it)" : "";
  const auto check = [&](const char* what, int64_t i, int64_t id, int64_t limit) {
    PC_EXPECTS(id >= lowest && id < limit, InvalidBlock, "the ", what, " of pair ", i, " is ", id, " and the smallest ",
               what, " cache has ", limit, " blocks; expected ", lowest, " to ", limit - 1, hint);
  };
  for (int64_t i = 0; i < sources.size; ++i) {
    const int64_t source = sources.at(i), target = targets.at(i);
    check("source", i, source, num_sources);
    check("target", i, target, num_targets);
    if (!runs.empty() && source == runs.back().source + runs.back().count &&
        target == runs.back().target + runs.back().count) {
      ++runs.back().count;
    } else {
      runs.push_back({source, target, 1});
    }
  }
  return sources.size;
}

}  // namespace pagecore::cpu
