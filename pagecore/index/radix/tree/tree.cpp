// Construction and receipts of the tree, single ids, and sizes.
#include "pagecore/index/radix/tree/tree.hpp"

#include <algorithm>
#include <random>

#include "pagecore/index/sizes.hpp"

namespace pagecore {

using radix::kNoNode;

namespace {

radix::Components checked_components(const RadixTree::Options& options) {
  const int64_t block_size = checked_size("block_size", options.block_size, 1, int64_t{1} << 20);
  PC_EXPECTS(options.full_lanes >= 0 && options.full_lanes <= 64, ShapeError, "full is ", options.full_lanes,
             "; use 0 to 64");
  PC_EXPECTS(options.full_lanes > 0 || !options.windows.empty() || options.has_states, ShapeError,
             "full is 0 and there are no windows and no states; give one of them");
  PC_EXPECTS(options.windows.size() <= 16, ShapeError, options.windows.size(), " windows are given; use at most 16");
  radix::Components components{block_size, static_cast<int32_t>(options.full_lanes), {}, options.has_states};
  components.min_kept = checked_size<int64_t>("min_kept", options.min_kept, 0, kMaxInt32);
  PC_EXPECTS(options.chunks.empty() || options.chunks.size() == options.windows.size(), ShapeError,
             options.chunks.size(), " chunks are given for ", options.windows.size(),
             " windows; give one for each, 0 for a window without chunks");
  PC_EXPECTS(options.sinks.empty() || options.sinks.size() == options.windows.size(), ShapeError, options.sinks.size(),
             " sinks are given for ", options.windows.size(), " windows; give one for each, 0 for a window without");
  for (size_t w = 0; w < options.windows.size(); ++w) {
    const int64_t chunk = options.chunks.empty() ? 0 : options.chunks[w];
    PC_EXPECTS(chunk >= 0 && chunk <= kMaxInt32, ShapeError, "a chunk is ", chunk, "; use 0 to ", kMaxInt32);
    const bool is_none = chunk > 0 && options.windows[w] == 0;
    const int64_t sinks = options.sinks.empty() ? 0 : options.sinks[w];
    PC_EXPECTS(sinks >= 0 && sinks <= kMaxInt32, ShapeError, "sinks are ", sinks, " tokens; use 0 to ", kMaxInt32);
    PC_EXPECTS(sinks == 0 || chunk == 0, UnsupportedOption, "a window has ", sinks, " sinks and chunks of ", chunk,
               "; use one of them");
    components.windows.push_back(
        {is_none ? 0 : checked_size("a window", options.windows[w], 1, kMaxInt32), chunk, sinks});
  }
  if (options.has_states) {
    const int64_t interval = checked_size<int64_t>("state_interval", options.state_interval, 1, kMaxInt32);
    PC_EXPECTS(interval % block_size == 0, ShapeError, "state_interval is ", interval,
               "; use a multiple of the block size ", block_size);
  }
  return components;
}

uint64_t draw_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

RadixTree::RadixTree(const Options& options)
    : nodes_(checked_components(options), draw_seed()),
      queues_(nodes_, options.policy, options.protected_share),
      state_interval_(options.state_interval) {}

RadixTree::~RadixTree() = default;

void RadixTree::reserve(int64_t nodes) {
  if (const size_t capacity = nodes_.growth(nodes); capacity > 0) queues_.reserve(capacity);
  nodes_.reserve(nodes);
}

void RadixTree::reserve_evicted(std::vector<Ids>& out) const {
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.reserve(static_cast<size_t>(kReservedIds));
}

// Receipts.

// Receipt for the path that ends with `end`; splits nodes where the windows begin.
RadixTree::Receipt RadixTree::lock_end(NodeId end, uint32_t components, bool is_hit) {
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    if (radix::has_component(components, w)) structure_.split_window(end, w);
  }
  return pins_.lock(end, components, is_hit);
}

RadixTree::Receipt RadixTree::lock(Match& match, uint32_t components) {
  if (match.node != kNoNode) reserve(1 + components_.num_cuts());
  queues_.begin_turn();
  note_reuse(match);
  return lock_prefix(match.node, match.offset, match.blocks, components, true);
}

void RadixTree::lock_all(std::span<Match> matches, uint32_t components, std::span<Receipt* const> receipts) {
  PC_ASSERT(receipts.size() == matches.size());
  std::vector<NodeId> found;  // the lower halves of splits keep their ids
  found.reserve(matches.size());
  reserve_locks(std::ssize(matches));
  for (size_t i = 0; i < matches.size(); ++i) {
    Match& match = matches[i];
    queues_.begin_turn();
    note_reuse(match);
    if (match.node == kNoNode) {
      *receipts[i] = pins_.lock(kNoNode, components, true);
      continue;
    }
    found.push_back(match.node);
    *receipts[i] = pin_prefix(match.node, match.offset, match.blocks, components, true);
    queues_.limit_protected();
  }
  for (const NodeId node : found) structure_.prune(node);
}

// Counts the state of a match as reused, and the deepest of those after it that would have served if it were there.
void RadixTree::note_reuse(const Match& match) {
  if (match.state != radix::kNoState) queues_.reuse_state(match.node);
  if (!components_.has_states) return;
  for (NodeId node = match.full_node; node >= 0 && nodes_.end(node) > match.blocks; node = nodes_.at(node).parent) {
    const radix::EvictionState& gone = nodes_.part(node, components_.state()).eviction;
    if (nodes_.end(node) > match.full_blocks || gone.evicted_after != nodes_.end(node)) continue;
    queues_.reuse_state(node);
    return;
  }
}

RadixTree::Receipt RadixTree::lock_shared(Match& match, bool is_hit) {
  if (match.shared_node != kNoNode) reserve(1 + components_.num_cuts());
  queues_.begin_turn();
  note_reuse(match);
  if (match.state != radix::kNoState) {  // at the end of its node
    queues_.touch(match.node, components_.state(), is_hit);
    queues_.refresh(match.node, components_.state());
  }
  return lock_prefix(match.shared_node, match.shared_offset, match.shared_blocks,
                     components_.all() & ~components_.state_bit(), is_hit);
}

void RadixTree::count_hit(const Receipt& receipt, int64_t state_blocks) {
  queues_.begin_turn();
  pins_.touch(receipt.node, receipt.components, true);
  for (NodeId node = receipt.node; state_blocks > 0 && node >= 0; node = nodes_.at(node).parent) {
    if (nodes_.end(node) != state_blocks || nodes_.at(node).state == radix::kNoState) continue;
    queues_.touch(node, components_.state(), true);
    queues_.refresh(node, components_.state());
  }
  queues_.limit_protected();
}

RadixTree::Receipt RadixTree::lock_full(Match& match) {
  if (match.full_node != kNoNode) reserve(1 + components_.num_cuts());
  queues_.begin_turn();
  return lock_prefix(match.full_node, match.full_offset, match.full_blocks,
                     components_.all() & ~components_.state_bit(), false);
}

RadixTree::Receipt RadixTree::lock_ahead(Match& match) {
  if (match.full_node != kNoNode) reserve(1 + components_.num_cuts());
  queues_.begin_turn();
  return lock_prefix(match.full_node, match.full_offset, match.full_blocks, match.ahead, false);
}

// Pins the first `blocks` blocks of the path through `node`, and updates the node and offset of their end.
RadixTree::Receipt RadixTree::lock_prefix(NodeId& node, int32_t& offset, int64_t blocks, uint32_t components,
                                          bool is_hit) {
  if (node == kNoNode) return pins_.lock(kNoNode, components, is_hit);
  const NodeId found = node;
  const Receipt receipt = pin_prefix(node, offset, blocks, components, is_hit);
  structure_.prune(found);  // the lower half of a split
  if (is_hit) queues_.limit_protected();
  return receipt;
}

RadixTree::Receipt RadixTree::pin_prefix(NodeId& node, int32_t& offset, int64_t blocks, uint32_t components,
                                         bool is_hit) {
  // An earlier lock of lock_all(), or lock_shared() before lock_ahead(), may have split the node.
  while (nodes_.at(node).depth >= blocks) node = nodes_.at(node).parent;
  offset = static_cast<int32_t>(blocks - nodes_.at(node).depth);
  if (offset < nodes_.at(node).size) node = structure_.split(node, offset);
  if (nodes_.at(node).state == radix::kNoState) components &= ~components_.state_bit();
  const Receipt receipt = lock_end(node, components, is_hit);
  offset = nodes_.at(node).size;  // lock_end() may have split the node where a window begins
  return receipt;
}

void RadixTree::unlock(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint) {
  queues_.begin_turn();
  pins_.release(receipt, components, hint);
  structure_.prune(receipt.node);
  if (receipt.components == 0) receipt.node = kNoNode;  // the node may be gone
}

void RadixTree::shorten(Receipt& receipt, int64_t blocks) noexcept {
  const NodeId old = receipt.node;
  if (old == kNoNode || blocks >= nodes_.end(old)) return;
  if (blocks > 0) {
    move_receipt(receipt, structure_.split_path(old, blocks));
  } else {
    queues_.begin_turn();
    pins_.release(receipt, components_.all(), {});
    receipt = pins_.lock(kNoNode, components_.all(), false);
  }
  structure_.prune(old);  // the lower half of a split keeps its id
}

// Single ids of a path.

void RadixTree::copy_tail(NodeId end, int32_t lane, std::span<int32_t> out) const {
  PC_EXPECTS(static_cast<int64_t>(out.size()) <= nodes_.end(end), ShapeError, "the path has ", nodes_.end(end),
             " blocks, got room for ", out.size());
  for (size_t left = out.size(); left > 0; end = nodes_.at(end).parent) {
    const auto size = static_cast<size_t>(nodes_.at(end).size);
    const size_t count = std::min(left, size);
    std::copy_n(nodes_.lane(end, lane) + (size - count), count,
                out.begin() + static_cast<std::ptrdiff_t>(left - count));
    left -= count;
  }
}

radix::NamespaceId RadixTree::copy_path(NodeId node, std::vector<int32_t>& tokens, std::vector<radix::Mark>& marks,
                                        std::vector<Ids>& ids) const {
  const radix::NamespaceId space = nodes_.copy_path(node, tokens, marks);
  ids.resize(static_cast<size_t>(num_lanes()));
  for (int32_t i = 0; i < num_lanes(); ++i) {
    Ids& lane = ids[static_cast<size_t>(i)];
    lane.resize(static_cast<size_t>(nodes_.end(node)));
    copy_tail(node, i, lane);
  }
  return space;
}

radix::NamespaceId RadixTree::copy_path_of(int32_t lane, int32_t id, std::vector<int32_t>& tokens,
                                           std::vector<radix::Mark>& marks) const {
  for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
    const std::span<const int32_t> ids(nodes_.at(node).size > 0 ? nodes_.lane(node, lane) : nullptr,
                                       static_cast<size_t>(nodes_.at(node).size));
    const auto place = std::find(ids.begin(), ids.end(), id);
    if (place == ids.end()) continue;
    const radix::NamespaceId space = nodes_.copy_path(node, tokens, marks);
    const int64_t blocks = nodes_.at(node).depth + (place - ids.begin()) + 1;
    tokens.resize(static_cast<size_t>(blocks * components_.block_size));
    std::erase_if(marks, [&](const radix::Mark& mark) { return mark.block >= blocks; });
    return space;
  }
  return -1;
}

int32_t RadixTree::id_at(NodeId end, int64_t block, int32_t lane) const {
  const NodeId node = nodes_.node_with(end, block);
  return nodes_.lane(node, lane)[block - nodes_.at(node).depth];
}

int32_t RadixTree::num_pins(NodeId end, int64_t block, int32_t component) const {
  return nodes_.pins(nodes_.node_with(end, block), component);
}

int32_t RadixTree::replace_id(NodeId end, int64_t block, int32_t lane, int32_t id) {
  const bool is_window = lane >= components_.full_lanes;
  PC_EXPECTS(id >= (is_window ? 0 : 1), InvalidBlock, "block ", id, " cannot be cached in lane ", lane,
             "; expected ids >= ", is_window ? 0 : 1);
  const NodeId node = nodes_.node_with(end, block);
  const auto place = static_cast<int32_t>(block - nodes_.at(node).depth);
  int32_t& held = nodes_.lane(node, lane)[place];
  const int32_t old = held;
  if (old == id) return old;
  if (id != kNullBlock && !claims_.held(lane).add(id)) claims_.refuse(lane, id);
  held = id;
  if (old != kNullBlock) claims_.held(lane).erase(old);
  if (!is_window) return old;
  const int32_t window = components_.owner_of(lane);
  if (old == kNullBlock) nodes_.part(node, window).first = std::min(nodes_.part(node, window).first, place);
  const int32_t by = (id != kNullBlock ? 1 : 0) - (old != kNullBlock ? 1 : 0);
  if (by != 0) queues_.change_count(node, window, by);
  if (by > 0) journal_.note_stored(window, node, place);
  if (by < 0) journal_.note_removed(window, node, place);
  return old;
}

// Journal.

void RadixTree::start_journal(size_t max_bytes, std::vector<radix::ContentHash> roots) {
  journal_.start(max_bytes, std::move(roots));
}

void RadixTree::take_changes(radix::Changes& out) noexcept { journal_.take(out); }

void RadixTree::list_contents(radix::Changes& out) const { journal_.list_contents(out); }

// Sizes.

RadixTree::Ids RadixTree::held_ids(int32_t lane) const {
  Ids ids;
  ids.reserve(static_cast<size_t>(claims_.held(lane).count()));
  claims_.held(lane).list(ids);
  return ids;
}

size_t RadixTree::nbytes() const {
  return sizeof(*this) + nodes_.nbytes() + queues_.nbytes() + claims_.nbytes() +
         path_.steps.capacity() * sizeof(radix::PathStep);
}

void RadixTree::check_invariants() const {
  nodes_.check_invariants();
  pins_.check_invariants();
  queues_.check_invariants();
  PC_ASSERT(queues_.capacity() >= nodes_.capacity());  // reserve() looks at the nodes alone
  claims_.check_invariants();
  namespaces_.check_invariants(nodes_.count_tops(namespaces_.count()));
  journal_.check_invariants();
}

}  // namespace pagecore
