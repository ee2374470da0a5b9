// Checks of the blocks or tokens that key heads select, and their copy for the kernels.
#include <algorithm>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"

namespace pagecore::cpu {
namespace {

const char* name_of(const Selection& selection) { return selection.by_block ? "blocks" : "indices"; }

}  // namespace

void CheckedBatch::check_selection(const AttentionArgs& args) {
  const Selection& selection = args.selection;
  has_selection_ = selection.data != nullptr;
  if (!has_selection_) return;
  const int64_t heads = args.key.num_heads, lists = num_sequences_ * heads;
  const auto grow = [](std::vector<int32_t>& values, int64_t size) {
    if (static_cast<int64_t>(values.size()) < size) values.resize(static_cast<size_t>(size));
  };
  grow(selected_, std::max<int64_t>(1, lists * selection.width));
  grow(selected_counts_, std::max<int64_t>(1, lists));
  grow(num_keys_, std::max<int64_t>(1, num_sequences_));
  for (int64_t i = 0; i < num_sequences_; ++i) {
    num_keys_[static_cast<size_t>(i)] = 0;
    for (int64_t head = 0; head < heads; ++head) check_selected(args, i, head);
  }
}

// Copies the list of one head, whose entries must ascend within the sequence.
void CheckedBatch::check_selected(const AttentionArgs& args, int64_t sequence, int64_t head) {
  const Selection& selection = args.selection;
  const char* name = name_of(selection);
  const int64_t length = seq_lens_[static_cast<size_t>(sequence)], unit = selection.unit;
  const int64_t limit = (length + unit - 1) / unit, at = sequence * args.key.num_heads + head;
  const Indices list = selection.list(sequence, head);
  const bool counted = selection.counts != nullptr;
  const int64_t count = counted ? selection.count(sequence, head) : selection.width;
  PC_EXPECTS(count >= 0 && count <= selection.width, ShapeError, "the count of ", name, "[", sequence, ", ", head,
             "] is ", count, "; expected 0 to ", selection.width, ", the last extent of ", name);
  int32_t* copy = selected_.data() + at * selection.width;
  int64_t before = -1, taken = 0;
  for (; taken < count; ++taken) {
    const int64_t entry = list.at(taken);
    if (!counted && entry < 0) break;
    PC_EXPECTS(entry >= 0 && entry < limit, ShapeError, name, "[", sequence, ", ", head, ", ", taken, "] is ", entry,
               " and sequence ", sequence, " of ", length, " tokens has ", limit, "; use 0 to ", limit - 1,
               ", and counts if a list is shorter");
    PC_EXPECTS(entry > before, ShapeError, name, "[", sequence, ", ", head, ", ", taken, "] is ", entry, " after ",
               before, "; a list must ascend, as pagecore.select returns it");
    copy[taken] = static_cast<int32_t>(entry);
    before = entry;
  }
  selected_counts_[static_cast<size_t>(at)] = static_cast<int32_t>(taken);
  const int64_t keys = taken == 0 ? 0 : (taken - 1) * unit + std::min(unit, length - before * unit);
  int32_t& most = num_keys_[static_cast<size_t>(sequence)];
  most = std::max(most, static_cast<int32_t>(keys));
}

void CheckedBatch::check_selected_blocks(const AttentionArgs& args, int64_t sequence, const KeyRange& keys) const {
  const auto at = static_cast<size_t>(sequence);
  const int64_t size = args.key.block_size, unit = args.selection.unit;
  for (int64_t head = 0; head < args.key.num_heads; ++head) {
    const int64_t list = sequence * args.key.num_heads + head;
    const int32_t* entries = selected_.data() + list * args.selection.width;
    for (int32_t i = 0; i < selected_counts_[static_cast<size_t>(list)]; ++i) {
      const int64_t first = entries[i] * unit;
      if (first >= keys.end || first + unit <= keys.begin) continue;
      const auto [blocks, limit, name] = blocks_of(args, sequence, first);
      const int64_t block = blocks.at(first / size);
      if (block >= 0 && block < limit) continue;
      // As without a selection, a block that the mask hides is not read.
      if (limit > 0 && args.mask_size >= 0 && !attended(args, sequence, first, first + unit)) continue;
      fail(ErrorKind::InvalidBlock, name, "[", rows_[at], ", ", first / size, "] is ", block, " and the cache has ",
           limit, " blocks; head ", head, " of sequence ", sequence, " selects it");
    }
  }
}

}  // namespace pagecore::cpu
