// Checks of sealed blocks: how many tokens of each sequence they have, and which blocks.
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"

namespace pagecore::cpu {

void CheckedBatch::check_sealed(const AttentionArgs& args) {
  const SealedBlocks& sealed = args.sealed;
  has_sealed_ = sealed.key.bits != 0;
  if (!has_sealed_) return;
  const int64_t size = args.key.block_size;
  sealed_lens_.resize(static_cast<size_t>(num_sequences_));
  for (int64_t i = 0; i < num_sequences_; ++i) {
    const int64_t length = sealed.lens.at(i), all = seq_lens_[static_cast<size_t>(i)];
    PC_EXPECTS(length >= 0 && length % size == 0, ShapeError, "sealed lens[", i, "] is ", length,
               "; whole blocks are sealed, so it must be a multiple of the block size ", size);
    PC_EXPECTS(length <= all, ShapeError, "sealed lens[", i, "] is ", length, " and seq_lens[", i, "] is ", all,
               "; sealed tokens are the first of the sequence");
    PC_EXPECTS(length == 0 || sealed.num_blocks > 0, ShapeError, "sealed lens[", i, "] is ", length,
               " and the sealed planes have no blocks; it must be 0");
    PC_EXPECTS(length / size <= sealed.table.width, ShapeError, "sealed lens[", i, "] is ", length,
               ", which is more than ", sealed.table.width, " blocks of ", size,
               " hold; the sealed block table is too narrow");
    sealed_lens_[static_cast<size_t>(i)] = static_cast<int32_t>(length);
  }
}

CheckedBatch::BlockList CheckedBatch::blocks_of(const AttentionArgs& args, int64_t sequence, int64_t position) const {
  const auto at = static_cast<size_t>(sequence);
  if (has_sealed_ && position < sealed_lens_[at]) {
    return {args.sealed.table.row(rows_[at]), args.sealed.num_blocks, "sealed block_table"};
  }
  const int64_t limit = args.key.num_blocks < args.value.num_blocks ? args.key.num_blocks : args.value.num_blocks;
  return {args.table.row(rows_[at]), limit, "block_table"};
}

}  // namespace pagecore::cpu
