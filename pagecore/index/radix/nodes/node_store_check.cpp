// Recount of the nodes.
#include <algorithm>

#include "pagecore/index/radix/nodes/node_store.hpp"

namespace pagecore::radix {

void NodeStore::check_invariants() const {
  map_.check_invariants();
  std::vector<int32_t> children(nodes_.size());
  int64_t live = 0;
  for (NodeId node = 0; node < num_ids(); ++node) {
    if (at(node).size == 0) continue;
    ++live;
    check_node(node);
    if (at(node).parent >= 0) ++children[static_cast<size_t>(at(node).parent)];
  }
  PC_ASSERT(live == size());
  PC_ASSERT(live + static_cast<int64_t>(free_.size()) == num_ids());
  for (size_t i = 0; i < nodes_.size(); ++i) PC_ASSERT(nodes_[i].children == children[i]);
  check_storages();
}

void NodeStore::check_node(NodeId node) const {
  const Node& it = at(node);
  const NodeStorage& storage = storages_[it.storage];
  PC_ASSERT(it.size > 0 && it.start >= 0 && it.start + it.size <= storage.capacity);
  PC_ASSERT(it.depth == end(it.parent));
  PC_ASSERT(it.parent < 0 || at(it.parent).size > 0);
  PC_ASSERT(it.hash ==
            hash_(it.parent, storages_.tokens(it.storage, it.start), components_.block_size, storage.marks, it.start));
  PC_ASSERT(map_.find(it.hash, [&](NodeId child) { return child == node; }) == node);
  PC_ASSERT(part(node, 0).count == it.size);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    const int32_t* const ids = lane(node, components_.lane_of(w));
    PC_ASSERT(part(node, w).count == it.size - std::count(ids, ids + it.size, kNullBlock));
    const int32_t first = std::min(part(node, w).first, it.size);
    PC_ASSERT(std::count(ids, ids + first, kNullBlock) == first);
  }
  if (components_.has_states) PC_ASSERT(part(node, components_.state()).count == (it.state != kNoState));
  PC_ASSERT(!is_empty(node));
}

void NodeStore::check_storages() const {
  std::vector<bool> is_linked(nodes_.size());
  size_t storages = 0;
  for (NodeId node = 0; node < num_ids(); ++node) {
    if (at(node).size == 0 || at(node).previous != kNoNode) continue;
    const NodeStorage& storage = storages_[at(node).storage];
    PC_ASSERT(storage.first == node);
    ++storages;
    int64_t live = 0, end = 0;
    for (NodeId slice = node; slice != kNoNode; slice = at(slice).next) {
      PC_ASSERT(at(slice).storage == at(node).storage && at(slice).start >= end);
      PC_ASSERT(at(slice).next == kNoNode || at(at(slice).next).previous == slice);
      end = int64_t{at(slice).start} + at(slice).size;
      live += at(slice).size;
      is_linked[static_cast<size_t>(slice)] = true;
    }
    PC_ASSERT(live == storage.live);
    PC_ASSERT(!StoragePool::is_sparse(storage) || storages_.was_memory_short());
  }
  PC_ASSERT(storages == storages_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) PC_ASSERT(is_linked[i] == (nodes_[i].size > 0));
}

std::vector<int32_t> NodeStore::count_tops(size_t count) const {
  std::vector<int32_t> tops(count);
  for (const Node& node : nodes_) {
    if (node.size > 0 && node.parent < 0) ++tops[static_cast<size_t>(namespace_of(node.parent))];
  }
  return tops;
}

}  // namespace pagecore::radix
