// Planted faults, inside the code of the index where possible: each sanitizer must instrument the index itself, not
// only the drivers.
#include <memory>
#include <thread>

#include "pagecore/index/tables/block_tables.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

struct Table {
  std::shared_ptr<BlockPool> pool = std::make_shared<BlockPool>(9, Order::Lifo);
  BlockTables tables{{pool}, {4}, 2, 3};
  RowId row = tables.add({});
};

}  // namespace

#if defined(__SANITIZE_ADDRESS__)

PC_PLANT(heap_overflow_in_fill, "AddressSanitizer: heap-buffer-overflow") {
  Table table;
  Exact<BlockId> blocks(3);
  table.tables.fill(std::span(&table.row, 1), 0, {blocks.data(), 1, 4, 4, nullptr, 0});
}

PC_PLANT(step_buffers_used_after_free, "AddressSanitizer: heap-use-after-free") {
  auto buffers = std::make_unique<StepBuffers>(2, 4, 1, SlotType::Int64);
  RowId* rows = buffers->rows();
  buffers.reset();
  rows[0] = 1;
}

PC_PLANT(misaligned_slots_in_extend, "runtime error: store to misaligned address") {
  Table table;
  Exact<int64_t> slots(3);
  const TokenCount count = 2;
  const SlotsOut out{reinterpret_cast<char*>(slots.data()) + 4, 2, SlotType::Int64};
  static_cast<void>(table.tables.try_extend(std::span(&table.row, 1), std::span(&count, 1), std::span(&out, 1)));
}

PC_PLANT(signed_overflow, "runtime error: signed integer overflow") {
  volatile int32_t most = INT32_MAX;
  most = most + 1;
}

PC_PLANT(index_past_the_size_of_a_vector, "Assertion '__n < this->size()' failed") {
  std::vector<int> values(3);
  values.reserve(8);
  volatile size_t at = 3;
  values[at] = 1;
}

PC_PLANT(leak, "LeakSanitizer: detected memory leaks") {
  volatile auto* lost = new int[25];
  lost[0] = 1;
  lost = nullptr;
}

#elif defined(__SANITIZE_THREAD__)

PC_PLANT(race_on_step_buffers, "ThreadSanitizer: data race") {
  StepBuffers buffers(4, 8, 1, SlotType::Int64);
  in_threads(2, [&](int) {
    for (int i = 0; i < 1000; ++i) buffers.pad(i % 4, i % 8, 9);
  });
}

PC_PLANT(race_on_a_pool_that_is_not_locked, "ThreadSanitizer: data race") {
  BlockPool pool(9, Order::Lifo);
  in_threads(2, [&](int) {
    BlockPool::Transaction transaction(pool);
    for (int i = 0; i < 1000; ++i) transaction.drop(transaction.take());
  });
}

PC_PLANT(locks_in_two_orders, "ThreadSanitizer: lock-order-inversion") {
  BlockPool a(9, Order::Lifo), b(9, Order::Lifo);
  BlockPool::Transaction first(a), second(b);
  std::thread([&] {
    const std::lock_guard outer(first);
    const std::lock_guard inner(second);
  }).join();
  std::thread([&] {
    const std::lock_guard outer(second);
    const std::lock_guard inner(first);
  }).join();
}

#endif
