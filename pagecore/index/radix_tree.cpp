// Looking up: nothing here changes the tree.
#include "pagecore/index/radix_tree.hpp"

#include <algorithm>
#include <limits>
#include <random>

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;
using radix::Query;

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int64_t checked_size(const char* name, int64_t value, int64_t most) {
  PC_EXPECTS(value >= 1 && value <= most, ShapeError, name, " is ", value, "; use 1 to ", most);
  return value;
}

uint64_t draw_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

RadixTree::RadixTree(const Options& options)
    : block_size_(checked_size("block_size", options.block_size, int64_t{1} << 20)),
      full_lanes_(static_cast<int32_t>(options.full_lanes)),
      has_states_(options.has_states),
      state_interval_(options.state_interval),
      policy_(options.policy),
      hash_(draw_seed()),
      runs_(block_size_, full_lanes_ + static_cast<int32_t>(options.windows.size())) {
  PC_EXPECTS(options.full_lanes >= 0 && options.full_lanes <= 64, ShapeError, "full is ", options.full_lanes,
             "; use 0 to 64");
  PC_EXPECTS(options.full_lanes > 0 || !options.windows.empty() || has_states_, ShapeError,
             "full is 0 and there are no windows and no states; give one of them");
  PC_EXPECTS(options.windows.size() <= 16, ShapeError, options.windows.size(), " windows are given; use at most 16");
  for (const int64_t window : options.windows) {
    checked_size("a window", window, kMaxInt32);
    windows_.push_back((window + block_size_ - 1) / block_size_);
  }
  if (has_states_) {
    checked_size("state_interval", state_interval_, kMaxInt32);
    PC_EXPECTS(state_interval_ % block_size_ == 0, ShapeError, "state_interval is ", state_interval_,
               "; use a multiple of the block size ", block_size_);
  }
  num_components_ = 1 + num_windows() + (has_states_ ? 1 : 0);
  const auto components = static_cast<size_t>(num_components_);
  heaps_.resize(components);
  expiries_.resize(components);
  evictable_.resize(components);
  held_.resize(components);
  held_ids_.resize(static_cast<size_t>(num_lanes()) + 1);
  static_cast<void>(add_namespace());  // 0, which never dies
}

radix::NamespaceId RadixTree::add_namespace() {
  if (!free_spaces_.empty()) {
    const radix::NamespaceId space = free_spaces_.back();
    free_spaces_.pop_back();
    space_children_[static_cast<size_t>(space)] = 0;
    return space;
  }
  PC_EXPECTS(static_cast<int64_t>(space_children_.size()) < kMaxInt32, NotEnoughMemory, kMaxInt32,
             " namespaces are in use; evict some");
  if (space_children_.size() == space_children_.capacity()) space_children_.reserve(space_children_.size() * 2 + 4);
  free_spaces_.reserve(space_children_.capacity());
  dead_.reserve(space_children_.capacity());
  is_listed_dead_.resize(space_children_.capacity());
  space_children_.push_back(0);
  return static_cast<radix::NamespaceId>(space_children_.size() - 1);
}

radix::NamespaceId RadixTree::dead_namespace() noexcept {
  while (!dead_.empty() && space_children_[static_cast<size_t>(dead_.back())] > 0) {
    is_listed_dead_[static_cast<size_t>(dead_.back())] = false;
    dead_.pop_back();
  }
  return dead_.empty() ? -1 : dead_.back();
}

void RadixTree::forget_dead_namespace() noexcept {
  const radix::NamespaceId space = dead_.back();
  dead_.pop_back();
  is_listed_dead_[static_cast<size_t>(space)] = false;
  space_children_[static_cast<size_t>(space)] = -1;
  free_spaces_.push_back(space);
}

void RadixTree::drop_namespace_if_empty(radix::NamespaceId space) noexcept {
  if (space == 0 || space_children_[static_cast<size_t>(space)] != 0) return;
  if (is_listed_dead_[static_cast<size_t>(space)]) return;
  is_listed_dead_[static_cast<size_t>(space)] = true;
  dead_.push_back(space);
}

radix::NodeId RadixTree::find_child(NodeId parent, const Query& query, int64_t block) const {
  const int32_t* const tokens = query.tokens.data() + block * block_size_;
  const uint32_t hash = hash_(parent, tokens, block_size_, query.marks, block);
  return map_.find(hash, [&](NodeId child) {
    const Node& node = at(child);
    return node.parent == parent && common_blocks(child, query, block, block + 1) == 1;
  });
}

// Leading blocks of the node that the query has from `block` on, which is below `limit`.
int32_t RadixTree::common_blocks(NodeId node, const Query& query, int64_t block, int64_t limit) const {
  const Node& it = at(node);
  const int64_t most = std::min<int64_t>(it.size, limit - block);
  const int64_t equal = radix::common_tokens(runs_.tokens(it.run, it.start), query.tokens.data() + block * block_size_,
                                             most * block_size_);
  const int64_t blocks = equal / block_size_;
  const std::vector<radix::Mark>& marks = runs_[it.run].marks;
  if (marks.empty() && query.marks.empty()) [[likely]]
    return static_cast<int32_t>(blocks);
  return static_cast<int32_t>(radix::common_marks(marks, it.start, query.marks, block, blocks));
}

// The longest prefix of a path that every component can reuse.
class RadixTree::Reuse {
 public:
  explicit Reuse(const RadixTree& tree) : tree_(tree) { std::fill_n(streaks_, tree.num_windows(), 0); }

  // The path goes on with `blocks` of `node`.
  void go_on(NodeId node, int32_t blocks, Match& match) {
    const Node& it = tree_.at(node);
    if (tree_.has_states_) {
      go_through_windows(node, blocks, false, match);
      if (blocks != it.size || it.state == kNoState || !is_whole(it.depth + blocks)) return;
      settle(node, blocks, match);
      match.state = it.state;
    } else if (tree_.num_windows() == 0) {
      settle(node, blocks, match);
    } else {
      go_through_windows(node, blocks, true, match);
    }
  }

 private:
  [[nodiscard]] bool is_whole(int64_t end) const {
    for (int32_t w = 0; w < tree_.num_windows(); ++w) {
      if (streaks_[w] < std::min(end, tree_.windows_[static_cast<size_t>(w)])) return false;
    }
    return true;
  }
  void settle(NodeId node, int32_t blocks, Match& match) const {
    match.blocks = tree_.at(node).depth + blocks;
    match.node = node;
    match.offset = blocks;
  }

  // Counts what every window has in a row; where the path may end at every block, notes the last that is whole.
  void go_through_windows(NodeId node, int32_t blocks, bool may_end, Match& match) {
    const Node& it = tree_.at(node);
    bool is_plain = true;
    for (int32_t w = 1; w <= tree_.num_windows(); ++w) {
      const int32_t count = tree_.part(node, w).count;
      is_plain = is_plain && (count == it.size || count == 0);
    }
    if (is_plain || !may_end) {
      for (int32_t w = 1; w <= tree_.num_windows(); ++w) count_run(node, w, 0, blocks);
      if (may_end && is_whole(it.depth + blocks)) settle(node, blocks, match);
      return;
    }
    for (int32_t i = 0; i < blocks; ++i) {
      for (int32_t w = 1; w <= tree_.num_windows(); ++w) count_run(node, w, i, i + 1);
      if (is_whole(int64_t{it.depth} + i + 1)) settle(node, i + 1, match);
    }
  }

  void count_run(NodeId node, int32_t window, int32_t first, int32_t last) {
    int64_t& streak = streaks_[window - 1];
    const int32_t count = tree_.part(node, window).count;
    if (count == tree_.at(node).size) {
      streak += last - first;
      return;
    }
    const int32_t* const ids = tree_.lane(node, tree_.lane_of(window));
    for (int32_t i = first; i < last; ++i) streak = ids[i] == kNullBlock ? 0 : streak + 1;
  }

  const RadixTree& tree_;
  int64_t streaks_[16];
};

RadixTree::Match RadixTree::match(const Query& query, int64_t limit) const {
  Match match;
  Reuse reuse(*this);
  NodeId parent = -1 - query.space;
  while (match.full_blocks < limit) {
    const NodeId child = find_child(parent, query, match.full_blocks);
    if (child == kNoNode) break;
    const int32_t blocks = common_blocks(child, query, match.full_blocks, limit);
    reuse.go_on(child, blocks, match);
    match.full_blocks += blocks;
    if (blocks < at(child).size) break;
    parent = child;
  }
  if (has_states_) {
    const int64_t checkpoint = match.full_blocks * block_size_ / state_interval_ * state_interval_;
    if (checkpoint > match.blocks * block_size_) match.checkpoint = checkpoint;
  }
  return match;
}

void RadixTree::copy_blocks(NodeId node, int32_t offset, int32_t lane, std::span<int32_t> out) const {
  int64_t end = static_cast<int64_t>(out.size());
  const int64_t first = lane < full_lanes_ ? 0 : window_start(lane - full_lanes_ + 1, end);
  std::fill_n(out.begin(), first, kNullBlock);
  int32_t size = offset;
  while (end > first) {
    const int64_t start = std::max(first, end - size);
    std::copy_n(this->lane(node, lane) + size - (end - start), end - start, out.begin() + start);
    end -= size;
    node = at(node).parent;
    if (end > first) size = at(node).size;
  }
}

size_t RadixTree::nbytes() const {
  size_t total = sizeof(*this) + nodes_.capacity() * sizeof(Node) + parts_.capacity() * sizeof(Part) +
                 free_nodes_.capacity() * sizeof(NodeId) + map_.nbytes() + runs_.nbytes();
  for (const auto& heap : heaps_) total += heap.nbytes();
  for (const auto& heap : expiries_) total += heap.nbytes();
  for (const auto& ids : held_ids_) total += ids.nbytes();
  return total + path_.capacity() * sizeof(Step) + slices_.capacity() * sizeof(radix::Slice);
}

}  // namespace pagecore
