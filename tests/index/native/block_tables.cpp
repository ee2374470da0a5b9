// BlockTables against their model: one to three groups, shared pools, short pools, invalid calls, and another holder of
// blocks of the same pools.
#include <memory>

#include "tests/index/native/tables_steps.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

class TablesLife : public TablesSteps {
 public:
  using TablesSteps::TablesSteps;

  void step() {
    if (random_.one_in(20)) follow();
    switch (random_.below(14)) {
      case 0: return add();
      case 1: return fork();
      case 2: return remove();
      case 3: return reorder();
      case 4:
      case 5:
      case 6:
      case 7: return extend();
      case 8: return prepare();
      case 9: return truncate();
      case 10: return release();
      case 11: return copies();
      case 12: return outsider();
      default: return look();
    }
  }
};

BlockTables make(std::vector<int64_t> sizes, int64_t rows, int64_t blocks) {
  std::vector<std::shared_ptr<BlockPool>> pools;
  for (size_t i = 0; i < sizes.size(); ++i) pools.push_back(std::make_shared<BlockPool>(9, Order::Lifo));
  return {std::move(pools), std::move(sizes), rows, blocks};
}

}  // namespace

PC_TEST(tables_behave_as_their_model) {
  rounds(400, [](Random& random) {
    TablesLife life(random);
    for (int i = 0; i < 120; ++i) {
      life.step();
      life.same();
      life.same_copy();
    }
    life.end();
  });
}

PC_TEST(tables_refuse_impossible_sizes) {
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX, INT64_MIN}) {
    PC_REFUSES(ShapeError, make({wrong}, 2, 2));
    PC_REFUSES(ShapeError, make({4}, wrong, 2));
    PC_REFUSES(ShapeError, make({4}, 2, wrong));
  }
  PC_REFUSES(ShapeError, make({}, 2, 2));
  PC_REFUSES(ShapeError, BlockTables({std::make_shared<BlockPool>(9, Order::Lifo)}, {4, 4}, 2, 2));
}

PC_TEST(tables_refuse_changes_that_are_not_recorded_or_exceed_int32) {
  BlockTables tables = make({4}, 2, 2);
  Exact<ChangedEntry> changes(1);
  PC_REFUSES(UnsupportedOption, static_cast<void>(tables.take_changes(changes.span())));
  PC_REFUSES(ShapeError, make({1, 1}, 32767, 32768).follow_changes());
  tables.follow_changes();
  PC_CHECK(tables.take_changes(changes.span()) == 0, "nothing has changed");
}

// Another holder freed blocks of the tables: the tables report it, and their destructor frees no block twice.
PC_TEST(tables_report_a_block_that_another_holder_freed) {
  auto pool = std::make_shared<BlockPool>(9, Order::Lifo);
  BlockTables tables({pool}, {4}, 3, 4);
  const RowId row = tables.add({});
  Exact<RowId> rows(std::vector<RowId>{row});
  Exact<TokenCount> counts(std::vector<TokenCount>{6});
  Exact<int64_t> slots(6);
  const SlotsOut out{slots.data(), 6, SlotType::Int64};
  PC_CHECK(tables.try_extend(rows.span(), counts.span(), std::span(&out, 1)), "blocks suffice");
  const Exact<BlockId> stolen(std::vector<BlockId>{tables.blocks(row, 0)[1]});
  pool->free(stolen.span());
  PC_REFUSES(DoubleFree, static_cast<void>(tables.try_extend(rows.span(), counts.span(), std::span(&out, 1))));
  PC_REFUSES(DoubleFree, static_cast<void>(tables.fork(row)));
  PC_REFUSES(DoubleFree, tables.remove(rows.span()));
  const Exact<TokenCount> none(std::vector<TokenCount>{0});
  PC_REFUSES(DoubleFree, tables.truncate(rows.span(), none.span(), false));
  PC_REFUSES(Internal, tables.check_invariants(false));
}
