// Single ids of a path that somebody holds: looked at, and exchanged for others that mean the same.
#include <algorithm>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

// The node of a path that has a block, counted from the start of the prefix.
RadixTree::NodeId RadixTree::node_with(NodeId node, int64_t block) const {
  PC_EXPECTS(block >= 0 && block < depth(node), ShapeError, "block ", block, " is none of the ", depth(node),
             " that the receipt holds; they are counted from 0");
  while (at(node).depth > block) node = at(node).parent;
  return node;
}

void RadixTree::copy_tail(NodeId node, int32_t which, std::span<int32_t> out) const {
  PC_EXPECTS(static_cast<int64_t>(out.size()) <= depth(node), ShapeError, out.size(),
             " blocks are asked for; the path has ", depth(node));
  for (size_t end = out.size(); end > 0; node = at(node).parent) {
    const auto size = static_cast<size_t>(at(node).size);
    const size_t count = std::min(end, size);
    std::copy_n(lane(node, which) + (size - count), count, out.begin() + static_cast<std::ptrdiff_t>(end - count));
    end -= count;
  }
}

int32_t RadixTree::id_at(NodeId end, int64_t block, int32_t which) const {
  const NodeId node = node_with(end, block);
  return lane(node, which)[block - at(node).depth];
}

int32_t RadixTree::replace_id(NodeId end, int64_t block, int32_t which, int32_t id) {
  const bool is_window = which >= full_lanes_;
  PC_EXPECTS(id >= (is_window ? 0 : 1), InvalidBlock, "block ", id, " cannot stand in lane ", which, "; ids run from ",
             is_window ? 0 : 1, " on");
  const NodeId node = node_with(end, block);
  const auto place = static_cast<int32_t>(block - at(node).depth);
  int32_t& held = lane(node, which)[place];
  const int32_t old = held;
  if (old == id) return old;
  PC_EXPECTS(id == kNullBlock || held_ids_[static_cast<size_t>(which)].add(id), DoubleFree, "block ", id,
             " is in the tree already, at another place; offer only what its prefix has computed");
  held = id;
  if (old != kNullBlock) held_ids_[static_cast<size_t>(which)].erase(old);
  if (!is_window) return old;
  const int32_t window = which - full_lanes_ + 1;
  if (old == kNullBlock) part(node, window).first = std::min(part(node, window).first, place);
  const int by = (id != kNullBlock ? 1 : 0) - (old != kNullBlock ? 1 : 0);
  if (by != 0) change_count(node, window, by);
  return old;
}

}  // namespace pagecore
