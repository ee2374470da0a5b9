#include "pagecore/index/radix/tree/structure.hpp"

namespace pagecore::radix {

NodeId Structure::split(NodeId node, int32_t blocks) {
  queues_.leave_protected(node);
  const NodeId top = nodes_.split(node, blocks);
  queues_.refresh(node);
  queues_.refresh(top);
  return top;
}

NodeId Structure::split_path(NodeId node, int64_t blocks) {
  while (nodes_.at(node).depth >= blocks) node = nodes_.at(node).parent;
  const int64_t size = blocks - nodes_.at(node).depth;
  return size == nodes_.at(node).size ? node : split(node, static_cast<int32_t>(size));
}

void Structure::split_window(NodeId end, int32_t window) {
  const Components& components = nodes_.components();
  const int64_t start = components.window_start(window, nodes_.end(end)), sinks = components.sink_blocks(window);
  if (start == 0) return;
  static_cast<void>(split_path(end, start));
  if (sinks > 0) static_cast<void>(split_path(end, sinks));
}

void Structure::remove_leaf(NodeId leaf) {
  queues_.remove(leaf);
  const NodeId parent = nodes_.remove_leaf(leaf);
  if (parent >= 0) {
    queues_.refresh(parent, 0);
  } else {
    namespaces_.remove_child(namespace_of(parent));
  }
}

int64_t Structure::prune(NodeId node) {
  int64_t blocks = 0;
  while (node >= 0 && nodes_.at(node).size > 0 && nodes_.is_empty(node)) {
    const NodeId parent = nodes_.at(node).parent;
    blocks += nodes_.at(node).size;
    queues_.change_count(node, 0, -nodes_.at(node).size);
    remove_leaf(node);
    node = parent;
  }
  return blocks;
}

}  // namespace pagecore::radix
