// Memory of nodes: reserved before a change, compacted and returned after.
#include <algorithm>
#include <limits>
#include <new>

#include "pagecore/index/radix/nodes/node_store.hpp"

namespace pagecore::radix {

namespace {

constexpr size_t kFewNodes = 16;
constexpr size_t kLooksOfCall = 16;
constexpr size_t kLooksOfNode = 8;

// Copies the first `size` elements into a new vector of the given capacity.
template <typename T>
void refit_vector(std::vector<T>& values, size_t size, size_t capacity) {
  std::vector<T> fitted;
  fitted.reserve(capacity);
  fitted.assign(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(size));
  values.swap(fitted);
}

}  // namespace

size_t NodeStore::growth_past_free(int64_t nodes) const {
  const size_t wanted = nodes_.size() + static_cast<size_t>(nodes) - free_.size();
  PC_EXPECTS(wanted <= static_cast<size_t>(std::numeric_limits<NodeId>::max()), NotEnoughMemory, "the tree would have ",
             wanted, " nodes; it can have ", std::numeric_limits<NodeId>::max(), "; evict some");
  if (wanted <= nodes_.capacity() && wanted <= free_.capacity()) return 0;
  return std::max(wanted, nodes_.size() + nodes_.size() / 2 + 16);
}

void NodeStore::reserve(int64_t nodes, size_t storages) {
  storages_.reserve(storages);
  map_.reserve(nodes);
  const size_t capacity = growth(nodes);
  if (capacity == 0) return;
  parts_.reserve(capacity * num_components_);
  slices_.reserve(capacity);
  free_.reserve(capacity);
  nodes_.reserve(capacity);
}

NodeId NodeStore::take() noexcept {
  if (free_.empty()) {
    nodes_.emplace_back();
    parts_.resize(nodes_.size() * num_components_);
    return static_cast<NodeId>(nodes_.size() - 1);
  }
  const NodeId node = free_.back();
  free_.pop_back();
  return node;
}

void NodeStore::release(NodeId node) noexcept {
  at(node) = Node{};
  free_.push_back(node);
  paid_looks_ += kLooksOfNode;
}

std::vector<NodeId> NodeStore::by_depth() const {
  std::vector<NodeId> order;
  order.reserve(static_cast<size_t>(size()));
  for (NodeId node = 0; node < num_ids(); ++node) {
    if (at(node).size > 0) order.push_back(node);
  }
  std::sort(order.begin(), order.end(), [this](NodeId a, NodeId b) { return at(a).depth < at(b).depth; });
  return order;
}

// Grows the storage by half, so that n blocks appended one by one cost O(n) and the unused room stays within I2 of
// node_storage.hpp.
void NodeStore::make_room(NodeId leaf, int64_t blocks) {
  const StorageId id = at(leaf).storage;
  const NodeStorage& storage = storages_[id];
  PC_ASSERT(at(leaf).next == kNoNode);
  if (int64_t{at(leaf).start} + at(leaf).size + blocks <= storage.capacity) return;
  const int64_t live = storage.live + blocks;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  PC_EXPECTS(live <= kMost, NotEnoughMemory, "a node storage would have ", live, " blocks; it can have ", kMost,
             "; use larger blocks");
  list_slices(storage);
  storages_.resize(id, slices_, static_cast<int32_t>(std::min(live + live / 2, kMost)));
  place_slices(storages_[id]);
}

void NodeStore::compact(StorageId id) {
  const NodeStorage& storage = storages_[id];
  if (storage.live == 0) {
    storages_.remove(id);
    return;
  }
  if (!StoragePool::is_sparse(storage)) return;
  list_slices(storage);
  if (storages_.compact(id, slices_)) place_slices(storages_[id]);
}

void NodeStore::list_slices(const NodeStorage& storage) {
  slices_.clear();
  for (NodeId node = storage.first; node != kNoNode; node = at(node).next) {
    slices_.push_back({at(node).start, at(node).size});
  }
}

void NodeStore::place_slices(const NodeStorage& storage) {
  size_t i = 0;
  for (NodeId node = storage.first; node != kNoNode; node = at(node).next) at(node).start = slices_[i++].start;
}

// Receipts refer to ids, so that only ids after the last live one can go; afterwards the lowest free ids are used
// first.
bool NodeStore::shrink() noexcept {
  map_.shrink();
  paid_looks_ += kLooksOfCall;
  const auto live = static_cast<size_t>(size());
  if (nodes_.size() <= kFewNodes || live * 2 > nodes_.size()) return false;
  if (live > 0 && paid_looks_ < nodes_.size()) return false;
  paid_looks_ = 0;
  size_t used = nodes_.size();
  while (used > 0 && nodes_[used - 1].size == 0) --used;
  try {
    if (used * 2 <= nodes_.size()) refit(used);
    storages_.pack([this](NodeId slice, StorageId storage) {
      for (; slice != kNoNode; slice = at(slice).next) at(slice).storage = storage;
    });
  } catch (const std::bad_alloc&) {  // the larger memory stays
  }
  free_.clear();
  for (size_t i = nodes_.size(); i-- > 0;) {
    if (nodes_[i].size == 0) free_.push_back(static_cast<NodeId>(i));
  }
  return true;
}

// Never grows: other structures have room for the ids below the old capacity only. nodes_ shrinks first: if a later
// vector cannot, it only has more capacity than nodes_.
void NodeStore::refit(size_t used) {
  const size_t capacity = std::min(used + used / 2 + 16, nodes_.capacity());
  refit_vector(nodes_, used, capacity);
  refit_vector(parts_, used * num_components_, capacity * num_components_);
  refit_vector(free_, 0, capacity);
  refit_vector(slices_, 0, capacity);
}

size_t NodeStore::nbytes() const {
  return nodes_.capacity() * sizeof(Node) + parts_.capacity() * sizeof(Part) + free_.capacity() * sizeof(NodeId) +
         slices_.capacity() * sizeof(Slice) + map_.nbytes() + storages_.nbytes();
}

}  // namespace pagecore::radix
