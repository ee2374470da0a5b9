// Private parts of a class, reached as the language allows it: access is not checked where a template is instantiated
// explicitly.
#pragma once

namespace {

template <typename Tag, auto Member>
struct Reach {
  friend auto reached(Tag) { return Member; }
};

}  // namespace

// REACH(Nodes, RadixTree, nodes_) in a namespace without a name; then tree.*reached(Nodes{}) is tree.nodes_.
#define REACH(tag, type, member) \
  struct tag {                   \
    friend auto reached(tag);    \
  };                             \
  template struct Reach<tag, &type::member>;
