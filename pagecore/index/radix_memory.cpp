// Memory: taken before anything changes, so that nothing fails half way, and given back once little of it is in use.
#include <algorithm>
#include <limits>
#include <new>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;

namespace {

constexpr size_t kFewNodes = 16;
constexpr size_t kLooksOfCall = 16;
constexpr size_t kLooksOfNode = 8;

// Another vector with the first `size` of its elements and room for `capacity`.
template <typename T>
void refit(std::vector<T>& values, size_t size, size_t capacity) {
  std::vector<T> fitted;
  fitted.reserve(capacity);
  fitted.assign(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(size));
  values.swap(fitted);
}

}  // namespace

void RadixTree::reserve(int64_t nodes) {
  runs_.reserve();
  map_.reserve(nodes);
  const int64_t missing = nodes - static_cast<int64_t>(free_nodes_.size());
  if (missing <= 0) return;
  const size_t wanted = nodes_.size() + static_cast<size_t>(missing);
  PC_EXPECTS(wanted <= static_cast<size_t>(std::numeric_limits<NodeId>::max()), NotEnoughMemory, wanted,
             " nodes do not fit the tree; evict some");
  if (wanted <= nodes_.capacity() && wanted <= free_nodes_.capacity()) return;
  const size_t capacity = std::max(wanted, nodes_.size() + nodes_.size() / 2 + 16);
  for (auto& heap : heaps_) heap.reserve(capacity);
  for (auto& heap : expiries_) heap.reserve(policy_ == radix::Policy::Priority ? capacity : 0);
  parts_.reserve(capacity * static_cast<size_t>(num_components_));
  slices_.reserve(capacity);
  free_nodes_.reserve(capacity);
  nodes_.reserve(capacity);
}

radix::NodeId RadixTree::take_node() noexcept {
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
    parts_.resize(nodes_.size() * static_cast<size_t>(num_components_));
    return static_cast<NodeId>(nodes_.size() - 1);
  }
  const NodeId node = free_nodes_.back();
  free_nodes_.pop_back();
  return node;
}

void RadixTree::free_node(NodeId node) noexcept {
  at(node) = Node{};
  free_nodes_.push_back(node);
  paid_looks_ += kLooksOfNode;
}

void RadixTree::compact(radix::RunId id) {
  const radix::Run& run = runs_[id];
  if (run.live == 0) {
    runs_.remove(id);
    return;
  }
  if (!radix::Runs::is_sparse(run)) return;
  list_slices(run);
  if (runs_.compact(id, slices_)) place_slices(runs_[id]);
}

void RadixTree::list_slices(const radix::Run& run) {
  slices_.clear();
  for (NodeId node = run.first; node != kNoNode; node = at(node).next) {
    slices_.push_back({at(node).start, at(node).size});
  }
}

void RadixTree::place_slices(const radix::Run& run) {
  size_t i = 0;
  for (NodeId node = run.first; node != kNoNode; node = at(node).next) at(node).start = slices_[i++].start;
}

// Ids stay, since receipts know them: what lies behind the last that is in use is given back, and the lowest ids are
// used first from then on. Where memory is short, it stays as it is. Looking costs O(nodes), and is paid for by the
// nodes that went and by the calls.
void RadixTree::shrink() noexcept {
  map_.shrink();
  paid_looks_ += kLooksOfCall;
  const auto live = static_cast<size_t>(num_nodes());
  if (nodes_.size() <= kFewNodes || live * 2 > nodes_.size()) return;
  if (live > 0 && paid_looks_ < nodes_.size()) return;
  paid_looks_ = 0;
  size_t used = nodes_.size();
  while (used > 0 && nodes_[used - 1].size == 0) --used;
  try {
    if (used * 2 <= nodes_.size()) refit_nodes(used);
    runs_.pack([this](NodeId slice, radix::RunId run) {
      for (; slice != kNoNode; slice = at(slice).next) at(slice).run = run;
    });
  } catch (const std::bad_alloc&) {
  }
  free_nodes_.clear();
  for (size_t i = nodes_.size(); i-- > 0;) {
    if (nodes_[i].size == 0) free_nodes_.push_back(static_cast<NodeId>(i));
  }
  for (radix::HeldIds& ids : held_ids_) ids.shrink();
}

// The nodes go first: what has room for more than them does no harm.
void RadixTree::refit_nodes(size_t used) {
  const size_t capacity = used + used / 2 + 16;
  refit(nodes_, used, capacity);
  refit(parts_, used * static_cast<size_t>(num_components_), capacity * static_cast<size_t>(num_components_));
  refit(free_nodes_, 0, capacity);
  refit(slices_, 0, capacity);
  refit(path_, 0, 0);
  for (auto& heap : heaps_) heap.shrink(capacity);
  for (auto& heap : expiries_) heap.shrink(policy_ == radix::Policy::Priority ? capacity : 0);
}

}  // namespace pagecore
