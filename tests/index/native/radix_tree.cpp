// RadixTree against its model: every component and policy, namespaces, marks, batches, wrong offers, and memory that
// runs out in the middle.
#include "tests/index/native/radix_life.hpp"

using namespace pagecore;
using namespace pagecore::test;

PC_TEST(tree_lives_as_its_model_does) {
  rounds(500, [](Random& random) {
    TreeLife life(random, some_options(random), false);
    for (int i = 0; i < 70; ++i) life.step();
    life.end();
  });
}

PC_TEST(tree_changes_nothing_when_memory_runs_out) {
  rounds(250, [](Random& random) {
    TreeLife life(random, some_options(random), true);
    for (int i = 0; i < 70; ++i) life.step();
    life.end();
  });
}

PC_TEST(tree_refuses_sizes_without_sense) {
  RadixTree::Options options;
  const auto refused_with = [&](int64_t& option, int64_t wrong) {
    const int64_t right = option;
    option = wrong;
    PC_REFUSES(ShapeError, RadixTree{options});
    option = right;
  };
  options.windows = {4, 4};
  options.has_states = true;
  options.state_interval = 16;
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX, INT64_MIN}) {
    for (int64_t* option : {&options.block_size, &options.windows[1], &options.state_interval})
      refused_with(*option, wrong);
    if (wrong != 0) refused_with(options.full_lanes, wrong);
  }
  refused_with(options.state_interval, 24);
  options.windows.assign(17, 4);
  PC_REFUSES(ShapeError, RadixTree{options});
  options.windows.clear();
  options.has_states = false;
  refused_with(options.full_lanes, 0);
}
