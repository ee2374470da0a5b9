// Access to private members for tests: explicit template instantiation does not check access.
#pragma once

namespace {

template <typename Tag, auto Member>
struct Reach {
  friend auto reached(Tag) { return Member; }
};

}  // namespace

// After REACH(Nodes, RadixTree, nodes_) in an unnamed namespace, tree.*reached(Nodes{}) is tree.nodes_.
#define REACH(tag, type, member) \
  struct tag {                   \
    friend auto reached(tag);    \
  };                             \
  template struct Reach<tag, &type::member>;
