// Lookup and changes of nodes.
#include "pagecore/index/radix/nodes/node_store.hpp"

#include <algorithm>

namespace pagecore::radix {

NodeStore::NodeStore(Components components, uint64_t seed)
    : components_(std::move(components)),
      num_components_(static_cast<size_t>(components_.count())),
      hash_(seed),
      storages_(components_.block_size, components_.num_lanes()) {}

bool NodeStore::has_nothing(NodeId node) const {
  if (at(node).children > 0 || at(node).path_pins > 0) return false;
  for (int32_t c = 1; c < components_.count(); ++c) {
    if (part(node, c).count > 0) return false;
  }
  return true;
}

NodeId NodeStore::find_child(NodeId parent, const Query& query, int64_t block) const {
  return map_.find(child_hash(parent, query, block), [&](NodeId child) {
    return at(child).parent == parent && common_blocks(child, query, block, block + 1) == 1;
  });
}

int32_t NodeStore::common_blocks(NodeId node, const Query& query, int64_t block, int64_t limit) const {
  const Node& it = at(node);
  const int64_t block_size = components_.block_size;
  const int64_t most = std::min<int64_t>(it.size, limit - block);
  const int64_t equal = common_tokens(storages_.tokens(it.storage, it.start), query.tokens.data() + block * block_size,
                                      most * block_size);
  const int64_t blocks = equal / block_size;
  const std::vector<Mark>& marks = storages_[it.storage].marks;
  if (marks.empty() && query.marks.empty()) [[likely]]
    return static_cast<int32_t>(blocks);
  return static_cast<int32_t>(common_marks(marks, it.start, query.marks, block, blocks));
}

void NodeStore::walk(const Query& query, NodeId parent, int64_t blocks, Path& path) const {
  path.steps.clear();
  path.start = path.end = end(parent);
  while (path.end < blocks) {
    const NodeId child = find_child(parent, query, path.end);
    if (child == kNoNode) break;
    const int32_t matched = common_blocks(child, query, path.end, blocks);
    path.steps.push_back({child, matched});
    path.end += matched;
    if (matched < at(child).size) break;
    parent = child;
  }
}

void NodeStore::retrace(NodeId last, int64_t end, Path& path) const {
  path.steps.clear();
  path.start = 0;
  path.end = end;
  for (NodeId node = last; node >= 0; node = at(node).parent) {
    const Node& it = at(node);
    if (it.depth < end) path.steps.push_back({node, std::min(it.size, static_cast<int32_t>(end) - it.depth)});
  }
  std::reverse(path.steps.begin(), path.steps.end());
}

NodeId NodeStore::node_with(NodeId node, int64_t block) const {
  PC_EXPECTS(block >= 0 && block < end(node), ShapeError, "the receipt holds blocks 0 to ", end(node) - 1,
             " of its prefix, got index ", block);
  while (at(node).depth > block) node = at(node).parent;
  return node;
}

int32_t NodeStore::state_after(const Path& path, int64_t blocks) const {
  for (const PathStep& step : path.steps) {
    if (end(step.node) == blocks && step.matched == at(step.node).size) return at(step.node).state;
  }
  return kNoState;
}

NodeId NodeStore::add_leaf(NodeId parent, const Query& query, int64_t first, NodeStorage&& storage) {
  const NodeId node = take();
  Node& it = at(node);
  it = Node{};
  it.parent = parent;
  it.size = storage.live;
  it.depth = static_cast<int32_t>(first);
  it.storage = storages_.add(std::move(storage));
  it.hash = hash_(parent, storages_.tokens(it.storage, 0), components_.block_size, query.marks, first);
  link_after(node, kNoNode, it.storage);
  map_.add(it.hash, node);
  for (int32_t c = 0; c < components_.count(); ++c) part(node, c) = Part{};
  if (parent >= 0) ++at(parent).children;
  return node;
}

NodeId NodeStore::split(NodeId node, int32_t blocks) {
  const NodeId top = take();
  Node& upper = at(top);
  Node& lower = at(node);
  upper = lower;
  upper.size = blocks;
  upper.children = 1;
  upper.receipts = 0;
  upper.path_pins = lower.path_pins > 0 ? 1 : 0;
  upper.state = kNoState;
  lower.parent = top;
  lower.start += blocks;
  lower.size -= blocks;
  lower.depth += blocks;
  link_after(top, lower.previous, lower.storage);
  map_.replace(lower.hash, node, top);
  lower.hash = hash_(top, storages_.tokens(lower.storage, lower.start), components_.block_size,
                     storages_[lower.storage].marks, lower.start);
  map_.add(lower.hash, node);
  for (int32_t c = 0; c < components_.count(); ++c) {
    Part& low = part(node, c);
    Part& high = part(top, c);
    high = low;
    high.receipts = high.first = 0;
    if (c == 0) {
      high.count = blocks;
    } else if (!components_.is_window(c)) {
      high.count = high.pins = 0;
    } else if (low.count == blocks + lower.size) {
      high.count = blocks;
    } else if (low.count > 0) {
      const int32_t* const ids = lane(top, components_.lane_of(c));
      high.count = static_cast<int32_t>(blocks - std::count(ids, ids + blocks, kNullBlock));
    }
    low.count -= high.count;
    low.first = 0;
  }
  return top;
}

NodeId NodeStore::remove_leaf(NodeId leaf) {
  const Node it = at(leaf);
  map_.erase(it.hash, leaf);
  unlink(leaf);
  storages_[it.storage].live -= it.size;
  release(leaf);
  compact(it.storage);
  if (it.parent >= 0) --at(it.parent).children;
  return it.parent;
}

void NodeStore::trim(NodeId leaf, int32_t blocks) {
  at(leaf).size -= blocks;
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    part(leaf, w).first = std::min(part(leaf, w).first, at(leaf).size);
  }
  storages_[at(leaf).storage].live -= blocks;
  compact(at(leaf).storage);
}

void NodeStore::append(NodeId leaf, const Query& query, std::span<const int32_t* const> lanes, int32_t blocks) {
  const int64_t block_size = components_.block_size;
  const int64_t first = end(leaf);
  Node& it = at(leaf);
  NodeStorage& storage = storages_[it.storage];
  const int64_t place = int64_t{it.start} + it.size;
  // Blocks that were evicted after the leaf may have had marks; the new blocks have none.
  storage.marks.erase(storage.marks.begin() + (first_mark_from(storage.marks, place) - storage.marks.data()),
                      storage.marks.end());
  std::copy_n(query.tokens.data() + first * block_size, blocks * block_size, storage.data.get() + place * block_size);
  for (size_t i = 0; i < lanes.size(); ++i) {
    std::copy_n(lanes[i] + first, blocks, storages_.lane(storage, static_cast<int32_t>(i)) + place);
  }
  it.size += blocks;
  storage.live += blocks;
}

bool NodeStore::can_join(NodeId upper, NodeId lower) const {
  if (upper < 0) return false;
  const Node& high = at(upper);
  if (high.storage != at(lower).storage || high.children != 1 || high.receipts != 0) return false;
  if (high.state != kNoState) return false;
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    if (part(upper, w).pins != part(lower, w).pins) return false;
    if (components_.sink_blocks(w) == at(lower).depth) return false;  // sinks are whole nodes
  }
  return true;
}

void NodeStore::join(NodeId upper, NodeId lower) {
  const Node high = at(upper);
  Node& low = at(lower);
  map_.erase(low.hash, lower);
  map_.replace(high.hash, upper, lower);
  unlink(upper);
  low.parent = high.parent;
  low.hash = high.hash;
  low.start = high.start;
  low.depth = high.depth;
  low.size += high.size;
  for (int32_t c = 0; c < components_.count(); ++c) {
    if (c == components_.state()) continue;
    part(lower, c).count += part(upper, c).count;
    part(lower, c).first = part(upper, c).first;
    part(lower, c).eviction = part(upper, c).eviction;
  }
  release(upper);
}

void NodeStore::link_after(NodeId node, NodeId previous, StorageId storage) {
  NodeId& next = previous == kNoNode ? storages_[storage].first : at(previous).next;
  at(node).previous = previous;
  at(node).next = next;
  if (next != kNoNode) at(next).previous = node;
  next = node;
}

void NodeStore::unlink(NodeId node) {
  const Node& it = at(node);
  (it.previous == kNoNode ? storages_[it.storage].first : at(it.previous).next) = it.next;
  if (it.next != kNoNode) at(it.next).previous = it.previous;
}

NamespaceId NodeStore::copy_path(NodeId node, std::vector<int32_t>& tokens, std::vector<Mark>& marks) const {
  const int64_t block_size = components_.block_size;
  tokens.resize(static_cast<size_t>(end(node) * block_size));
  marks.clear();
  for (; node >= 0; node = at(node).parent) {
    const Node& it = at(node);
    std::copy_n(storages_.tokens(it.storage, it.start), it.size * block_size, tokens.begin() + it.depth * block_size);
    const std::vector<Mark>& held = storages_[it.storage].marks;
    const Mark* const stop = first_mark_from(held, int64_t{it.start} + it.size);
    for (const Mark* mark = first_mark_from(held, it.start); mark != stop; ++mark) {
      marks.push_back(*mark);
      marks.back().block += it.depth - it.start;
    }
    if (it.parent < 0) break;
  }
  std::stable_sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.block < b.block; });
  return node < 0 ? 0 : namespace_of(at(node).parent);
}

}  // namespace pagecore::radix
