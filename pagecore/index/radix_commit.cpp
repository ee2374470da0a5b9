// Changes that cannot fail, for callers whose own change must not stop half way.
#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;

void RadixTree::reserve_ids(int32_t lane, int32_t num_ids) { held_ids_[static_cast<size_t>(lane)].reserve(num_ids); }

void RadixTree::reserve_evicted(std::vector<Ids>& out) const {
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.reserve(static_cast<size_t>(kReservedIds));
}

void RadixTree::shorten(Receipt& receipt, int64_t blocks) noexcept {
  const NodeId old = receipt.node;
  if (old == kNoNode || blocks >= depth(old)) return;
  if (blocks > 0) {
    move_receipt(receipt, split_path(old, blocks));
  } else {
    ++turn_;
    drop(receipt, ~0u, radix::RetentionHint{});
    receipt = {kNoNode, (uint32_t{1} << num_components_) - 1};
    ++num_receipts_;
  }
  prune(old);  // the lower half of a split keeps its id
}

bool RadixTree::try_extend(const Offer& offer, Receipt& receipt, Inserted& out) noexcept {
  try {
    extend(offer, receipt, out);
    return true;
  } catch (...) {
    return false;
  }
}

bool RadixTree::try_insert(const Offer& offer, Receipt& receipt, Inserted& out) noexcept {
  try {
    insert(offer, &receipt, out);
    return true;
  } catch (...) {
    return false;
  }
}

int32_t RadixTree::num_pins(NodeId end, int64_t block, int32_t component) const {
  const NodeId node = node_with(end, block);
  return component == 0 ? at(node).path_pins : part(node, component).pins;
}

}  // namespace pagecore
